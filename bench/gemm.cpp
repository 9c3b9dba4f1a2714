// Measures matrix products and attention at GPT-2's shapes beside a loop that does nothing but multiply-adds
// in registers, in alternating rounds of one process, and prints JSON lines: the best round of each.
// `bench_gemm [--threads N] [--rounds N]
// [--tokens N] [--vocab N] [filter]`. With one thread its CPU time is taken, which other processes disturb
// less.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/cpu_isa.h"
#include "tensor/kernels.h"

namespace {

using namespace sherd;
using namespace sherd::tensor;
using Count = std::int64_t;

struct Options {
  int threads = available_cores(), rounds = 5;
  Count tokens = 2048, vocab = 50257;
  std::string filter;
};

double now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

#if defined(__x86_64__)
// Sixteen independent sums hide the latency of every instruction that is timed here.
#define SHERD_SUMS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define SHERD_BODY(ZERO, STEP) \
  SHERD_SUMS(ZERO) ZERO(14) ZERO(15) "1:\n" SHERD_SUMS(STEP) SHERD_SUMS(STEP) "dec %0\njnz 1b\nvzeroupper"
#define SHERD_LOOP(ZERO, STEP)                                                                             \
  asm volatile(SHERD_BODY(ZERO, STEP)                                                                      \
               : "+r"(n)                                                                                   \
               :                                                                                           \
               : "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
                 "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
#define SHERD_ZERO(i) "vxorps %%xmm" #i ",%%xmm" #i ",%%xmm" #i "\n"
#define SHERD_FMA_512(i) "vfmadd231ps %%zmm14,%%zmm15,%%zmm" #i "\n"
#define SHERD_FMA_256(i) "vfmadd231ps %%ymm14,%%ymm15,%%ymm" #i "\n"
#define SHERD_DOT_512(i) "vdpbf16ps %%zmm14,%%zmm15,%%zmm" #i "\n"
constexpr double steps = 28;
[[gnu::target("avx512f")]] void fma_512(Count n) {
  SHERD_LOOP(SHERD_ZERO, SHERD_FMA_512);
}
[[gnu::target("avx512f")]] void dot_512(Count n) {
  SHERD_LOOP(SHERD_ZERO, SHERD_DOT_512);
}
[[gnu::target("avx2")]] void fma_256(Count n) {
  SHERD_LOOP(SHERD_ZERO, SHERD_FMA_256);
}

struct Peak {
  void (*loop)(Count);
  double flops;  ///< per turn
};
/// The loop that bounds products of `dtype`; an empty one where the processor has no multiply-add.
Peak peak_of(DType dtype) {
  if (dtype == DType::bf16 && cpu_has_bf16_products()) return {dot_512, steps * 64};
  if (cpu_isa() == CpuIsa::avx512) return {fma_512, steps * 32};
  if (cpu_isa() == CpuIsa::avx2) return {fma_256, steps * 16};
  return {nullptr, 0};
}
#else
struct Peak {
  void (*loop)(Count);
  double flops;
};
Peak peak_of(DType) {
  return {nullptr, 0};
}
#endif

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        device_(device::make_cpu_device(options.threads)),
        kernels_(make_kernels(*device_)) {}

  void run() {
    const Count t = options_.tokens, h = 768;
    for (const DType dtype : {DType::bf16, DType::f32}) {
      for (const auto& [name, in, out] :
           {Layer{"projection", h, h}, Layer{"qkv", h, 3 * h}, Layer{"up", h, 4 * h}, Layer{"down", 4 * h, h},
            Layer{"head", h, options_.vocab}}) {
        product(dtype, name + " forward", t, out, in, false, true);
        product(dtype, name + " dx", t, in, out, false, false);
        product(dtype, name + " dw", out, in, t, true, false);
      }
      attention(dtype);
    }
  }

 private:
  struct Layer {
    std::string name;
    Count in, out;
  };

  Tensor make(const Shape& shape, DType dtype) {
    Tensor x = Tensor::empty(*device_, shape, dtype);
    Tensor block = Tensor::empty(*device_, {4096}, dtype);
    kernels_->fill_normal(block, {1, 2}, 0, 0, 1);
    for (Count i = 0; i < x.numel(); i += 4096) {
      const Count n = std::min<Count>(4096, x.numel() - i);
      kernels_->copy(block.range(0, n), x.range(i, i + n));
    }
    return x;
  }

  double seconds(const std::function<void()>& body) const {
    const clockid_t clock = options_.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    const double begin = now(clock);
    body();
    return now(clock) - begin;
  }

  /// FLOP/s of the register loop in about `flops` operations.
  double peak(DType dtype, double flops) {
    const Peak loop = peak_of(dtype);
    if (!loop.loop) return 0;
    const auto turns = static_cast<Count>(flops / options_.threads / loop.flops) + 1;
    const double time = seconds(
        [&] { device_->arena().parallel_for(options_.threads, 1, [&](Count, Count) { loop.loop(turns); }); });
    return loop.flops * static_cast<double>(turns) * options_.threads / time;
  }

  void measure(DType dtype, const std::string& name, const std::string& what, double flops,
               const std::function<void()>& body) {
    body();
    double rate = 0, limit = 0;
    for (int round = 0; round < options_.rounds; ++round) {
      limit = std::max(limit, peak(dtype, std::clamp(flops, 1e9, 2e10)));
      rate = std::max(rate, flops / seconds(body));
    }
    std::printf(
        "{\"kernel\": \"%s\", \"dtype\": \"%s\", %s, \"threads\": %d, \"ms\": %.3f, \"gflops\": %.1f, "
        "\"peak_gflops\": %.1f, \"of_peak\": %.3f}\n",
        name.c_str(), std::string(name_of(dtype)).c_str(), what.c_str(), options_.threads, flops / rate * 1e3,
        rate / 1e9, limit / 1e9, limit > 0 ? rate / limit : 0.0);
    std::fflush(stdout);
  }

  bool wanted(DType dtype, const std::string& name) const {
    return cat(name_of(dtype), " ", name).find(options_.filter) != std::string::npos;
  }

  void product(DType dtype, const std::string& name, Count m, Count n, Count k, bool ta, bool tb) {
    if (!wanted(dtype, name)) return;
    const Matmul args{.a = make(ta ? Shape{k, m} : Shape{m, k}, dtype),
                      .b = make(tb ? Shape{n, k} : Shape{k, n}, dtype),
                      .c = make({m, n}, dtype),
                      .trans_a = ta,
                      .trans_b = tb,
                      .bias = {},
                      .pre_activation = {}};
    measure(dtype, name,
            cat("\"m\": ", m, ", \"n\": ", n, ", \"k\": ", k, ", \"layout\": \"", ta ? "T" : "N",
                tb ? "T" : "N", "\""),
            2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
            [&] { kernels_->matmul(args); });
  }

  void attention(DType dtype) {
    if (!wanted(dtype, "attention")) return;
    const Count seq = 512, heads = 12, dim = 64, batch = std::max<Count>(1, options_.tokens / seq);
    for (const float dropout : {0.0f, 0.1f}) {
      const Attention geometry{.heads = heads, .kv_heads = heads, .dropout = dropout, .key = {1, 2}};
      const Tensor qkv = make({batch, seq, 3 * heads * dim}, dtype),
                   dout = make({batch, seq, heads * dim}, dtype);
      const Tensor out = make(dout.shape(), dtype), dqkv = make(qkv.shape(), dtype);
      const Tensor lse = make({batch, heads, seq}, DType::f32);
      const std::string what = cat("\"batch\": ", batch, ", \"seq\": ", seq, ", \"heads\": ", heads,
                                   ", \"head_dim\": ", dim, ", \"dropout\": ", dropout);
      const double product =
          static_cast<double>(batch * heads * seq * (seq + 1) * dim);  // the causal half of 2·s²·d
      kernels_->attention(qkv, geometry, out, lse);
      measure(dtype, "attention forward", what, 2 * product,
              [&] { kernels_->attention(qkv, geometry, out, lse); });
      measure(dtype, "attention backward", what, 5 * product,
              [&] { kernels_->attention_backward(qkv, geometry, out, lse, dout, dqkv); });
    }
  }

  Options options_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--", 0) != 0) {
      options.filter = arg;
      continue;
    }
    const Count value = i + 1 < argc ? std::atoll(argv[++i]) : 0;
    if (arg == "--threads" && value > 0)
      options.threads = static_cast<int>(value);
    else if (arg == "--rounds" && value > 0)
      options.rounds = static_cast<int>(value);
    else if (arg == "--tokens" && value > 0)
      options.tokens = value;
    else if (arg == "--vocab" && value > 0)
      options.vocab = value;
    else
      return std::fprintf(stderr,
                          "usage: bench_gemm [--threads N] [--rounds N] [--tokens N] [--vocab N] [filter]\n"),
             2;
  }
  try {
    Bench(options).run();
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "bench_gemm: %s\n", error.what()), 1;
  }
  return 0;
}

// Times the CPU kernels at GPT-2's shapes beside a parallel memcpy that moves as many bytes, in alternating
// rounds of one process, and prints JSON lines: the best round of each. `bench_kernels [--threads N]
// [--rounds N] [filter]`. With one thread its CPU time is taken, which other processes disturb less.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/cpu_isa.h"
#include "tensor/kernels.h"

namespace {

using namespace sherd;
using namespace sherd::tensor;

struct Options {
  int threads = available_cores(), rounds = 15;
  std::string filter;
};

/// `reads` and `writes` are the tensors a kernel must at least move once; a tensor in both counts twice.
struct Case {
  std::string name;
  std::vector<Tensor> reads, writes;
  std::function<void()> run;
};

double now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        device_(device::make_cpu_device(options.threads)),
        kernels_(make_kernels(*device_)) {}

  void run() {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      elementwise(dtype);
      rows(dtype);
      loss(dtype);
      sharding(dtype);
    }
    movement();
  }

 private:
  Tensor make(const Shape& shape, DType dtype) {
    Tensor x = Tensor::empty(*device_, shape, dtype);
    Tensor block = Tensor::empty(*device_, {4096}, dtype);
    kernels_->fill_normal(block, {1, 2}, 0, 0, 1);
    for (std::int64_t i = 0; i < x.numel(); i += 4096) {
      const std::int64_t n = std::min<std::int64_t>(4096, x.numel() - i);
      std::memcpy(x.range(i, i + n).raw(), block.raw(), block.range(0, n).bytes());
    }
    return x;
  }
  Tensor ids(std::int64_t n, std::int32_t limit) {
    Tensor x = Tensor::empty(*device_, {n}, DType::i32);
    for (std::int64_t i = 0; i < n; ++i)
      x.data<std::int32_t>()[i] = static_cast<std::int32_t>(philox({3, 4}, static_cast<std::uint64_t>(i))[0] %
                                                            static_cast<std::uint32_t>(limit));
    return x;
  }

  void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
    device_->arena().parallel_for(
        static_cast<std::int64_t>(bytes), 128 << 10, [&](std::int64_t begin, std::int64_t end) {
          std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
        });
  }

  void measure(const Case& test, DType dtype) {
    const std::string name = test.name + "." + std::string(name_of(dtype));
    if (name.find(options_.filter) == std::string::npos) return;
    std::size_t bytes = 0;
    for (const Tensor& t : test.reads) bytes += t.bytes();
    for (const Tensor& t : test.writes) bytes += t.bytes();
    const Tensor from = Tensor::zeros(*device_, {static_cast<std::int64_t>(bytes / 2)}, DType::u8);
    const Tensor to = Tensor::zeros(*device_, {static_cast<std::int64_t>(bytes / 2)}, DType::u8);
    double copy = 1e9, run = 1e9;
    for (int round = -1; round < options_.rounds; ++round) {
      const double start = now(clock_);
      copy_bytes(to.raw(), from.raw(), from.bytes());
      const double middle = now(clock_);
      test.run();
      const double end = now(clock_);
      if (round >= 0) copy = std::min(copy, middle - start), run = std::min(run, end - middle);
    }
    std::printf(
        "{\"kernel\": \"%s\", \"ms\": %.3f, \"gb_per_s\": %.2f, \"memcpy_ms\": %.3f, \"of_memcpy\": %.2f}\n",
        name.c_str(), run * 1e3, static_cast<double>(bytes) / run / 1e9, copy * 1e3, copy / run);
    std::fflush(stdout);
  }

  void elementwise(DType dtype) {
    const Tensor x = make({2048, 3072}, dtype), dy = make({2048, 3072}, dtype), y = make({2048, 3072}, dtype);
    const Tensor narrow = make({2048, 1536}, dtype);
    const RandomKey key{5, 6};
    measure({"add", {x, dy}, {y}, [&] { kernels_->add(x, dy, y); }}, dtype);
    measure({"scale", {x}, {y}, [&] { kernels_->scale(x, 0.5, y); }}, dtype);
    for (const auto& [kind, name] :
         {std::pair{Activation::gelu_tanh, "gelu_tanh"}, {Activation::gelu_erf, "gelu_erf"}}) {
      measure({name, {x}, {y}, [&, kind = kind] { kernels_->activation(kind, x, y); }}, dtype);
      measure({std::string(name) + "_backward",
               {x, dy},
               {y},
               [&, kind = kind] { kernels_->activation_backward(kind, x, dy, y); }},
              dtype);
    }
    measure({"tanh", {x}, {y}, [&] { kernels_->tanh(x, y); }}, dtype);
    measure({"relu", {x}, {y}, [&] { kernels_->relu(x, y); }}, dtype);
    measure({"swiglu", {x}, {narrow}, [&] { kernels_->swiglu(x, narrow); }}, dtype);
    measure({"swiglu_backward", {x, narrow}, {y}, [&] { kernels_->swiglu_backward(x, narrow, y); }}, dtype);
    const Tensor h = make({2048, 768}, dtype), r = make({2048, 768}, dtype), o = make({2048, 768}, dtype);
    measure({"dropout_residual", {h, r}, {o}, [&] { kernels_->dropout(h, r, 0.1f, key, o); }}, dtype);
    measure({"dropout_backward", {h}, {o}, [&] { kernels_->dropout_backward(h, 0.1f, key, o); }}, dtype);
  }

  void rows(DType dtype) {
    const Tensor x = make({4, 512, 768}, dtype), dy = make({4, 512, 768}, dtype),
                 y = make({4, 512, 768}, dtype);
    const Tensor w = make({768}, dtype), b = make({768}, dtype), dw = make({768}, dtype),
                 db = make({768}, dtype);
    const Tensor mean = make({2048}, DType::f32), rstd = make({2048}, DType::f32);
    measure({"layer_norm", {x}, {y}, [&] { kernels_->layer_norm(x, w, b, 1e-5, y, mean, rstd); }}, dtype);
    measure({"layer_norm_backward",
             {x, dy},
             {y},
             [&] { kernels_->layer_norm_backward(x, w, mean, rstd, dy, y, dw, db, false); }},
            dtype);
    measure({"rms_norm", {x}, {y}, [&] { kernels_->rms_norm(x, w, 1e-5, y, rstd); }}, dtype);
    measure({"rms_norm_backward",
             {x, dy},
             {y},
             [&] { kernels_->rms_norm_backward(x, w, rstd, dy, y, dw, false); }},
            dtype);
    const Tensor table = make({50257, 768}, dtype), token = ids(2048, 50257),
                 positions = make({1024, 768}, dtype);
    measure({"embedding", {x}, {y}, [&] { kernels_->embedding(token, table, y); }}, dtype);
    measure(
        {"embedding_backward", {dy}, {table}, [&] { kernels_->embedding_backward(token, dy, table, false); }},
        dtype);
    measure({"embedding_backward_accumulate",
             {dy, dy},
             {dy},
             [&] { kernels_->embedding_backward(token, dy, table, true); }},
            dtype);
    measure({"add_positions", {x}, {y}, [&] { kernels_->add_positions(x, positions, y); }}, dtype);
    measure({"add_positions_backward",
             {dy},
             {positions},
             [&] { kernels_->add_positions_backward(dy, positions, false); }},
            dtype);
    const Tensor qkv = make({4, 512, 2304}, dtype), rotated = make({4, 512, 2304}, dtype);
    Attention geometry;
    geometry.heads = geometry.kv_heads = 12;
    measure({"rotary", {qkv}, {rotated}, [&] { kernels_->rotary(qkv, geometry, 1e4, false, rotated); }},
            dtype);
  }

  void loss(DType dtype) {
    const Tensor logits = make({2048, 50257}, dtype), targets = ids(2048, 50257),
                 lse = make({2048}, DType::f32);
    const Tensor value = make({1}, DType::f32);
    measure({"cross_entropy",
             {logits},
             {},
             [&] { kernels_->cross_entropy(logits, targets, 0, -100, value, lse); }},
            dtype);
    kernels_->cross_entropy(logits, targets, 0, -100, value, lse);
    measure({"cross_entropy_backward",
             {logits},
             {logits},
             [&] { kernels_->cross_entropy_backward(logits, targets, lse, 0, -100, 1); }},
            dtype);
  }

  void sharding(DType dtype) {
    const std::int64_t n = 12 << 20;
    const std::vector<Tensor> sources{make({n}, dtype), make({n}, dtype)};
    const Tensor out = make({n}, dtype), wide = make({n}, DType::f32);
    measure({"sum_ranks_2",
             {sources[0], sources[1]},
             {out},
             [&] { kernels_->sum_ranks(sources, 0.5, dtype, out, false); }},
            dtype);
    measure({"sum_ranks_2_into_fp32",
             {sources[0], sources[1], wide},
             {wide},
             [&] { kernels_->sum_ranks(sources, 0.5, dtype, wide, true); }},
            dtype);
    ExactSum sum;
    measure({"sum_of_squares", {out}, {}, [&] { kernels_->sum_of_squares(out, sum); }}, dtype);
    measure({"all_finite", {out}, {}, [&] { kernels_->all_finite(out); }}, dtype);
    measure({"fill", {}, {out}, [&] { kernels_->fill(out, 0); }}, dtype);
    const Tensor small = make({1 << 20}, dtype);
    measure({"fill_normal_1m",
             {},
             {small},
             [&] {
               kernels_->fill_normal(small, {1, 2}, 0, 0, 0.02);
             }},
            dtype);
    measure({"fill_uniform_1m", {}, {small}, [&] { kernels_->fill_uniform(small, {1, 2}, 0, 0, 1); }}, dtype);
    const Tensor other = make({n}, dtype), loss_value = make({1}, DType::f32);
    measure({"mean_squared_error",
             {out, other},
             {},
             [&] { kernels_->mean_squared_error(out, other, loss_value); }},
            dtype);
  }

  void movement() {
    const std::int64_t n = 12 << 20;
    for (const auto& [a, b] : {std::pair{DType::f32, DType::bf16}, {DType::f32, DType::f16}}) {
      const Tensor x = make({n}, a), y = make({n}, b);
      const std::string pair = std::string(name_of(a)) + "_" + std::string(name_of(b));
      measure({"copy_narrow_" + pair, {x}, {y}, [&] { kernels_->copy(x, y); }}, b);
      measure({"copy_widen_" + pair, {y}, {x}, [&] { kernels_->copy(y, x); }}, b);
    }
    const Tensor x = make({n}, DType::f32), y = make({n}, DType::f32);
    measure({"copy_same", {x}, {y}, [&] { kernels_->copy(x, y); }}, DType::f32);
  }

  Options options_;
  clockid_t clock_ = options_.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--threads" && i + 1 < argc)
      options.threads = std::stoi(argv[++i]);
    else if (arg == "--rounds" && i + 1 < argc)
      options.rounds = std::stoi(argv[++i]);
    else
      options.filter = arg;
  }
  std::printf("{\"isa\": \"%s\", \"threads\": %d, \"rounds\": %d}\n", std::string(name_of(cpu_isa())).c_str(),
              options.threads, options.rounds);
  Bench(options).run();
}

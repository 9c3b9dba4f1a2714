#include "bench/suite/gemm_bench.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/cpu_isa.h"
#include "base/error.h"
#include "bench/suite/limits.h"
#include "engine/report/gemm_probe.h"
#include "tensor/kernels.h"
#include "tensor/library_version.h"

namespace sherd::bench {
namespace {

using tensor::Shape;
using tensor::Tensor;
using Count = std::int64_t;

struct BenchProduct {
  const char* name;
  Count in, out;
};

std::array<BenchProduct, 5> layers(const GemmBenchOptions& o) {
  const Count h = o.hidden;
  return {{{"projection", h, h},
           {"qkv", h, 3 * h},
           {"up", h, 4 * h},
           {"down", 4 * h, h},
           {"head", h, o.vocabulary}}};
}

class GemmBench {
 public:
  GemmBench(const GemmBenchOptions& options, const Tell& tell)
      : options_(options),
        tell_(tell),
        device_(device::make_cpu_device(options.threads)),
        kernels_(tensor::make_kernels(*device_)) {}

  std::vector<std::vector<ReportField>> run() {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      peak_ = register_peak(dtype);
      for (const auto& [name, in, out] : layers(options_)) {
        product(dtype, cat(name, " forward"), {options_.tokens, out, in}, false, true);
        product(dtype, cat(name, " dx"), {options_.tokens, in, out}, false, false);
        product(dtype, cat(name, " dw"), {out, in, options_.tokens}, true, false);
      }
      attention(dtype);
    }
    return std::move(rows_);
  }

 private:
  struct Sizes {
    Count m, n, k;
  };

  // Random values: processors draw less power, and run faster, on constant ones.
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

  bool wanted(DType dtype, const std::string& name) const {
    return cat(name_of(dtype), " ", name).find(options_.only) != std::string::npos;
  }

  void measure(DType dtype, const std::string& name, const std::string& shape, double flops,
               std::function<void()> body) {
    const std::string label = cat(name_of(dtype), " ", name);
    Rounds times(options_.rounds, tell_,
                 options_.threads == 1 ? Rounds::Clock::thread_cpu : Rounds::Clock::wall);
    double peak_flops = 0;
    std::vector<Contender> contenders{{label, std::move(body)}};
    const double about = std::clamp(flops, 1e8, 2e10);
    if (peak_.loop)
      contenders.push_back({"peak", [&] { peak_flops = run_peak(peak_, device_->arena(), about); }});
    times.run(contenders);
    std::vector<ReportField> row{{"case", "product", label}, {"shape", "shape", shape}};
    add_rates(row, times, label, flops, peak_.loop ? "peak" : "", peak_flops, "gflop_per_s", "GFLOP/s");
    rows_.push_back(std::move(row));
  }

  void product(DType dtype, const std::string& name, const Sizes& s, bool ta, bool tb) {
    if (!wanted(dtype, name)) return;
    const tensor::Matmul args{.a = make(ta ? Shape{s.k, s.m} : Shape{s.m, s.k}, dtype),
                              .b = make(tb ? Shape{s.n, s.k} : Shape{s.k, s.n}, dtype),
                              .c = make({s.m, s.n}, dtype),
                              .trans_a = ta,
                              .trans_b = tb,
                              .bias = {},
                              .pre_activation = {}};
    measure(dtype, name, cat(s.m, "x", s.n, "x", s.k, " ", ta ? "T" : "N", tb ? "T" : "N"),
            2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k),
            [&] { kernels_->matmul(args); });
  }

  void attention(DType dtype) {
    const Count dim = 64, heads = std::max<Count>(1, options_.hidden / dim);
    const Count seq = std::min<Count>(512, options_.tokens), batch = options_.tokens / seq;
    for (const float dropout : {0.0f, 0.1f}) {
      const std::string suffix = dropout > 0 ? " dropout" : "";
      const std::string forward = "attention" + suffix + " forward",
                        backward = "attention" + suffix + " backward";
      if (!wanted(dtype, forward) && !wanted(dtype, backward)) continue;
      const tensor::Attention geometry{.heads = static_cast<int>(heads),
                                       .kv_heads = static_cast<int>(heads),
                                       .dropout = dropout,
                                       .key = {1, 2}};
      const Tensor qkv = make({batch, seq, 3 * heads * dim}, dtype),
                   dout = make({batch, seq, heads * dim}, dtype);
      const Tensor out = make(dout.shape(), dtype), dqkv = make(qkv.shape(), dtype);
      const Tensor lse = make({batch, heads, seq}, DType::f32);
      const std::string shape = cat(batch, "x", seq, ", ", heads, "x", dim);
      const auto product =
          static_cast<double>(batch * heads * seq * (seq + 1) * dim);  // the causal half of 2·s²·d
      kernels_->attention(qkv, geometry, out, lse);                    // the backward pass reads its result
      if (wanted(dtype, forward))
        measure(dtype, forward, shape, 2 * product, [&] { kernels_->attention(qkv, geometry, out, lse); });
      if (wanted(dtype, backward))
        measure(dtype, backward, shape, 5 * product,
                [&] { kernels_->attention_backward(qkv, geometry, out, lse, dout, dqkv); });
    }
  }

  GemmBenchOptions options_;
  Tell tell_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  RegisterPeak peak_;
  std::vector<std::vector<ReportField>> rows_;
};

}  // namespace

double gemm_bench_memory(const GemmBenchOptions& options) {
  double most = 0;
  const auto tokens = static_cast<double>(options.tokens);
  for (const BenchProduct& layer : layers(options)) {
    const auto in = static_cast<double>(layer.in), out = static_cast<double>(layer.out);
    most = std::max(most, 4 * (tokens * in + in * out + tokens * out));
  }
  return std::max(most,
                  4 * tokens * 8 * static_cast<double>(options.hidden));  // attention: qkv, out and gradients
}

BenchReport measure_gemm(const GemmBenchOptions& options, const Tell& tell) {
  BenchReport report{
      "gemm",
      "Products and attention of a transformer",
      "a loop of multiply-adds in registers, of the widest kind the processor has for the dtype",
      {{"processor", "", engine::cpu_model()},
       {"isa", "instruction set", std::string(name_of(cpu_isa()))},
       {"library", "", tensor::matmul_library()},
       {"tokens", "tokens", options.tokens},
       {"hidden", "hidden", options.hidden},
       {"vocabulary", "vocabulary", options.vocabulary},
       {"threads", "threads", std::int64_t{options.threads}},
       {"rounds", "rounds", std::int64_t{options.rounds}},
       {"bf16_limit", "", register_peak(DType::bf16).name},
       {"fp32_limit", "", register_peak(DType::f32).name}},
      GemmBench(options, tell).run(),
      {}};
  require(!report.rows.empty(), "no product's name holds '", options.only,
          "'; they are named like 'bf16 qkv forward', 'fp32 head dw' and 'bf16 attention backward'");
  report.notes.push_back(cat("bf16 against ", register_peak(DType::bf16).name, ", fp32 against ",
                             register_peak(DType::f32).name,
                             "; shapes are MxNxK with the layout of A and B, or "
                             "sequences, heads"));
  return report;
}

}  // namespace sherd::bench

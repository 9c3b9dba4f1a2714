// The gated delta rule forward, and forward with its gradient, for a peer (bench/delta_vs_hf.py). It answers
// the case named on each line of standard input, "forward" or "both" and a dtype, with its seconds.
#include <map>
#include <string>
#include <utility>

#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "tensor/kernels.h"

namespace {

using namespace sherd;
using tensor::Tensor;

class DeltaStep {
 public:
  DeltaStep(tensor::Kernels& kernels, DType dtype, std::int64_t rows)
      : kernels_(kernels),
        rule_{.key_heads = 16, .value_heads = 32, .key_dim = 128},
        qkv_(room({1, rows, 16 * (2 * 128 + 2 * 128)}, dtype)),
        gates_(room({1, rows, 64}, DType::f32)),
        states_(room({1, 32, (rows + 63) / 64, 128, 128}, DType::f32)),
        out_(room({1, rows, 32 * 128}, dtype)),
        dqkv_(room(qkv_.shape(), dtype)),
        dgates_(room(gates_.shape(), DType::f32)) {
    kernels_.fill_normal(qkv_, {1, 1}, 0, 0, 1);
    // b in [0, 1) and g in [-1, 0), as transformers gets them (bench/delta_vs_hf.py).
    const Tensor all = room({2, rows, 32}, DType::f32);
    kernels_.fill_uniform(all.rows(0, 1), {1, 2}, 0, 0, 1);
    kernels_.fill_uniform(all.rows(1, 2), {1, 3}, 0, -1, 0);
    kernels_.copy_rows({all, 0, 32}, {gates_, 0, 64}, rows, 32);
    kernels_.copy_rows({all, rows * 32, 32}, {gates_, 32, 64}, rows, 32);
  }
  void forward(bool keeps) { kernels_.delta_rule(qkv_, gates_, rule_, {}, keeps ? states_ : Tensor(), out_); }
  void backward() { kernels_.delta_rule_backward(qkv_, gates_, rule_, states_, out_, dqkv_, dgates_); }

 private:
  Tensor room(const tensor::Shape& shape, DType dtype) {
    return Tensor::empty(kernels_.device(), shape, dtype);
  }

  tensor::Kernels& kernels_;
  tensor::DeltaRule rule_;
  Tensor qkv_, gates_, states_, out_, dqkv_, dgates_;
};

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_delta_step", [&] {
    std::int64_t rows = 4096;
    int threads = available_cores();
    bench::Options("bench_delta_step", "[--rows 4096] [--threads N]")
        .value("rows", rows)
        .value("threads", threads)
        .parse(argc, argv);
    require(rows > 0 && threads > 0, "numbers must be positive");
    const auto device = device::make_cpu_device(threads);
    const auto kernels = tensor::make_kernels(*device);
    std::map<std::string, DeltaStep> steps;
    for (const auto& [name, dtype] : {std::pair{"fp32", DType::f32}, {"bf16", DType::bf16}})
      steps.emplace(std::piecewise_construct, std::tuple(name), std::tie(*kernels, dtype, rows));
    bench::serve("{}", [&](const std::string& line) {
      const std::size_t space = line.find(' ');
      const auto found = space == std::string::npos ? steps.end() : steps.find(line.substr(space + 1));
      require(found != steps.end(), "no case \"", line, "\"");
      const bool both = line.starts_with("both");
      return bench::seconds_of([&] {
        found->second.forward(both);
        if (both) found->second.backward();
      });
    });
  });
}

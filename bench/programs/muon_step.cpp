// Muon's step on the matrices of a transformer block, for a peer (bench/muon_vs_torch.py): directions,
// orthogonalisation and update of the library, on one rank, with bf16 gradients and parameters, fp32 masters
// and fp32 momenta. It answers the case named on each line of standard input, "step" or "orthogonalize", with
// its seconds.
#include <string>
#include <vector>

#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "optim/muon.h"

namespace {

using namespace sherd;
using tensor::Tensor;

struct MuonMatrix {
  Tensor master, param, grad, momentum, direction;
};

class MuonBlock {
 public:
  MuonBlock(std::int64_t hidden, int threads)
      : device_(device::make_cpu_device(threads)), kernels_(tensor::make_kernels(*device_)) {
    for (int i = 0; i < 4; ++i) add(hidden, hidden);
    add(4 * hidden, hidden), add(hidden, 4 * hidden);
  }

  void orthogonalize() {
    for (MuonMatrix& m : matrices_) optim::orthogonalize(m.direction, hyper_, *kernels_);
  }
  void step() {
    ++steps_;
    for (MuonMatrix& m : matrices_) {
      optim::SpanUpdate span;
      span.master = m.master.data<float>(), span.grad = m.grad.raw(), span.grad_dtype = DType::bf16;
      span.moments[0] = m.momentum.raw(), span.param = m.param.raw(), span.param_dtype = DType::bf16;
      span.n = m.grad.numel();
      optim::directions(span, hyper_, steps_, m.direction.raw(), DType::bf16, device_->arena());
      optim::orthogonalize(m.direction, hyper_, *kernels_);
      span.grad = m.direction.raw(), span.moments[0] = nullptr;
      span.grad_factor = optim::step_scale(hyper_, m.direction.shape()[0], m.direction.shape()[1]);
      require(optim::update(span, optim::step_rule(hyper_), steps_, device_->arena()), "not finite");
    }
  }

 private:
  void add(std::int64_t rows, std::int64_t columns) {
    const auto room = [&](DType dtype) { return Tensor::empty(*device_, {rows, columns}, dtype); };
    MuonMatrix m{room(DType::f32), room(DType::bf16), room(DType::bf16), room(DType::f32), room(DType::bf16)};
    kernels_->fill_normal(m.master, {1, 1}, 0, 0, 0.02);
    kernels_->fill_normal(m.grad, {1, 2}, 0, 0, 0.01);
    kernels_->fill(m.momentum, 0);
    kernels_->copy(m.grad, m.direction);
    matrices_.push_back(m);
  }

  std::shared_ptr<device::Device> device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  optim::Hyper hyper_ = config::default_rule(config::OptimizerType::muon);
  std::vector<MuonMatrix> matrices_;
  std::int64_t steps_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_muon_step", [&] {
    std::int64_t hidden = 768;
    int threads = available_cores();
    bench::Options("bench_muon_step", "[--hidden 768] [--threads N]")
        .value("hidden", hidden)
        .value("threads", threads)
        .parse(argc, argv);
    require(hidden > 0 && threads > 0, "numbers must be positive");
    MuonBlock block(hidden, threads);
    bench::serve("{}", [&](const std::string& line) {
      require(line == "step" || line == "orthogonalize", "no case \"", line, "\"");
      return bench::seconds_of([&] { line == "step" ? block.step() : block.orthogonalize(); });
    });
  });
}

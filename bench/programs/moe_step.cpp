// A layer of experts, forward and backward, beside a dense feed-forward layer of as many multiply-adds per
// token, for a peer (bench/moe_vs_hf.py): weights, activations and gradients in bf16, one rank.
// Answers the case named on each line of standard input, "moe" or "dense", with its seconds in all, in
// products and in each other family of kernels.

#include <sstream>

#include "autograd/ops.h"
#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "bench/programs/timed_kernels.h"
#include "nn/layers.h"
#include "sharding/parallel/experts/moe.h"
#include "support/plain_parameters.h"

namespace {

using namespace sherd;

struct MoeSettings {
  parallel::MoeOptions layer;
  std::int64_t batch = 4, seq = 512;
  int threads = available_cores();
  std::string grads = "bf16";
};

/// An expert that takes all tokens, as wide as all those of a token.
class Dense : public nn::Layer {
 public:
  explicit Dense(const parallel::MoeOptions& o) : gated_(o.gated) {
    const std::int64_t width = o.ffn_hidden * o.routing.top_k;
    up_ = add("up", std::make_shared<nn::Linear>(
                        o.hidden, gated_ ? 2 * width : width,
                        nn::LinearOptions{.bias = false,
                                          .activation = gated_ ? tensor::Activation::none : o.activation,
                                          .init = o.init}));
    down_ = add("down", std::make_shared<nn::Linear>(
                            width, o.hidden, nn::LinearOptions{.bias = false, .init = o.output_init}));
  }

 protected:
  autograd::Var forward(autograd::Tape& tape, const autograd::Var& x) override {
    const autograd::Var wide = (*up_)(tape, x);
    return (*down_)(tape, gated_ ? autograd::glu(wide) : wide);
  }

 private:
  bool gated_;
  std::shared_ptr<nn::Linear> up_, down_;
};

class Case {
 public:
  Case(test::Cpu& cpu, const MoeSettings& s, std::unique_ptr<nn::Layer> layer)
      : kernels_(*cpu.kernels),
        layer_(std::move(layer)),
        parameters_(kernels_, *layer_, DType::bf16, 1, *parse_dtype(s.grads)),
        x_(cpu.normal({s.batch, s.seq, s.layer.hidden}, 1, DType::bf16)),
        dy_(cpu.normal({s.batch, s.seq, s.layer.hidden}, 2, DType::bf16, 1e-3)) {}

  std::string run() {
    kernels_.reset();
    autograd::Tape tape(kernels_);
    tape.random = {1, ++step_};
    const double seconds = bench::seconds_of([&] {
      parameters_.zero_grad();
      const autograd::Var y = (*layer_)(tape, tape.variable(x_));
      tape.backward({{y, dy_}});
    });
    std::ostringstream out;
    out << "{\"seconds\": " << seconds;
    for (std::size_t i = 0; i < tensor::kernel_families.size(); ++i)
      if (const double part = kernels_.seconds(static_cast<tensor::KernelFamily>(i)); part > 0)
        out << ", \"" << tensor::kernel_families[i] << "\": " << part;
    out << '}';
    return out.str();
  }

 private:
  bench::TimedKernels kernels_;
  std::unique_ptr<nn::Layer> layer_;
  test::PlainParameters parameters_;
  tensor::Tensor x_, dy_;
  std::uint64_t step_ = 0;
};

MoeSettings parse(int argc, char** argv) {
  MoeSettings s;
  parallel::MoeOptions& o = s.layer;
  o.hidden = 768, o.ffn_hidden = 3072, o.experts = 8;
  o.routing = {.top_k = 2, .normalize = true};
  o.losses.balance = 0.01;
  bench::Options("bench_moe_step",
                 "[--hidden 768] [--ffn 3072] [--experts 8] [--top-k 2] [--gated] [--grads bf16|fp32]\n"
                 "  [--batch 4] [--seq 512] [--threads N]")
      .value("hidden", o.hidden)
      .value("ffn", o.ffn_hidden)
      .value("experts", o.experts)
      .value("top-k", o.routing.top_k)
      .flag("gated", o.gated)
      .value("grads", s.grads)
      .value("batch", s.batch)
      .value("seq", s.seq)
      .value("threads", s.threads)
      .parse(argc, argv);
  require(s.batch > 0 && s.seq > 0 && s.threads > 0, "numbers must be positive");
  require(s.grads == "bf16" || s.grads == "fp32", "--grads takes bf16 or fp32, not '", s.grads, "'");
  return s;
}

/// The work of the products that both layers have, in forward and backward.
double flops(const MoeSettings& s) {
  const parallel::MoeOptions& o = s.layer;
  const std::int64_t multiply_adds = o.hidden * o.ffn_hidden * (o.gated ? 3 : 2) * o.routing.top_k;
  return 3 * 2.0 * static_cast<double>(s.batch * s.seq * multiply_adds);
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_moe_step", [&] {
    const MoeSettings s = parse(argc, argv);
    test::Cpu cpu(s.threads);
    Case moe(cpu, s, std::make_unique<parallel::Moe>(s.layer));
    Case dense(cpu, s, std::make_unique<Dense>(s.layer));
    bench::serve(cat("{\"flops\": ", flops(s), "}"), [&](const std::string& line) {
      require(line == "moe" || line == "dense", "no case \"", line, "\"");
      return (line == "moe" ? moe : dense).run();
    });
  });
}

// A model of one's own, trained under any ZeRO stage: learns f(x, y) = sin(3x)·cos(2y) from samples.
//
//   build/examples/own_model configs/own_model.json [--ranks N]
//   mpirun -n N build/examples/own_model configs/own_model.json
#include <sherd/sherd.h>

#include <cmath>
#include <cstdio>

namespace {

using namespace sherd;

/// h + W₂·gelu(W₁·h): the block whose parameters are gathered, and whose gradients are sent off, together.
class Residual : public nn::Layer {
 public:
  explicit Residual(std::int64_t width)
      : up_(add("up", std::make_shared<nn::Linear>(
                          width, 4 * width, nn::LinearOptions{.activation = tensor::Activation::gelu_tanh}))),
        down_(add("down", std::make_shared<nn::Linear>(4 * width, width))) {}

 protected:
  Var forward(Tape& tape, const Var& h) override { return autograd::add(h, (*down_)(tape, (*up_)(tape, h))); }

 private:
  std::shared_ptr<nn::Linear> up_, down_;
};

class Regressor : public nn::Model {
 public:
  Regressor(std::int64_t width, int depth)
      : in_(add("in", std::make_shared<nn::Linear>(2, width))),
        blocks_(add("blocks", std::make_shared<nn::LayerList>())),
        out_(add("out", std::make_shared<nn::Linear>(width, 1))) {
    for (int i = 0; i < depth; ++i) blocks_->append(std::make_shared<Residual>(width));
  }

 protected:
  // Only forward is written; gradients come from the tape.
  Var forward(Tape& tape, const Batch& batch) override {
    const Var x = tape.input(batch.at("x"));
    return autograd::mean_squared_error((*out_)(tape, (*blocks_)(tape, (*in_)(tape, x))), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> in_;
  std::shared_ptr<nn::LayerList> blocks_;
  std::shared_ptr<nn::Linear> out_;
};

std::shared_ptr<const data::Dataset> samples(std::int64_t count, device::Device& device) {
  std::vector<float> x, y;
  for (std::int64_t i = 0; i < count; ++i) {
    const float a = 2 * uniform_at({1, 2}, static_cast<std::uint64_t>(2 * i)) - 1;
    const float b = 2 * uniform_at({1, 2}, static_cast<std::uint64_t>(2 * i + 1)) - 1;
    x.insert(x.end(), {a, b});
    y.push_back(std::sin(3 * a) * std::cos(2 * b));
  }
  return data::make_tensor_dataset(
      {{"x", Tensor::of<float>(device, {count, 2}, x)}, {"y", Tensor::of<float>(device, {count, 1}, y)}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: own_model CONFIG.json [--ranks N]\n"), 2;
  const auto host = device::make_cpu_device(1);
  const auto data = samples(4096, *host);
  return launch(argc, argv, [&](DistributedPtr dist) {
    auto [engine, optimizer, loader, scheduler] =
        initialize({.dist = dist,
                    .model = [] { return std::make_shared<Regressor>(64, 3); },
                    .config = argv[1],
                    .training_data = data});
    for (int epoch = 1; epoch <= 5; ++epoch) {
      for (auto& batch : *loader) {
        auto loss = engine->forward(batch);
        engine->backward(loss);
        engine->step();
      }
      if (dist->rank() == 0)
        std::printf("epoch %d  step %lld  loss %.5f\n", epoch, static_cast<long long>(engine->global_steps()),
                    engine->last_step().loss);
    }
  });
}

// A model of one's own, cut into stages that ranks hold: each computes some of its layers, on one micro-batch
// after the other.
//
//   build/examples/pipeline STAGES [--ranks N]      e.g.  2 --ranks 4: two pipelines of two stages
#include <sherd/sherd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

using namespace sherd;

/// h + W2·gelu(W1·h).
class Residual : public nn::Layer {
 public:
  Residual()
      : up_(add("up", std::make_shared<nn::Linear>(
                          32, 64, nn::LinearOptions{.activation = tensor::Activation::gelu_tanh}))),
        down_(add("down", std::make_shared<nn::Linear>(64, 32))) {}

 protected:
  Var forward(Tape& tape, const Var& h) override { return autograd::add(h, (*down_)(tape, (*up_)(tape, h))); }

 private:
  std::shared_ptr<nn::Layer> up_, down_;
};

std::shared_ptr<nn::Model> make_model() {
  std::vector<std::shared_ptr<nn::Layer>> layers{std::make_shared<nn::Linear>(2, 32)};
  for (int i = 0; i < 6; ++i) layers.push_back(std::make_shared<Residual>());
  layers.push_back(std::make_shared<nn::Linear>(32, 1));
  return std::make_shared<nn::SequentialModel>(
      layers, [](Tape& tape, const Batch& batch) { return tape.input(batch.at("x")); },
      [](const Var& y, const Batch& batch) { return autograd::mean_squared_error(y, batch.at("y")); });
}

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: pipeline STAGES [--ranks N]\n"), 2;
  const std::string settings = cat(
      R"({"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 8, "parallel": {"pipeline": )",
      std::atoi(argv[1]), R"(}, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0}}})");
  const auto host = device::make_cpu_device(1);
  std::vector<float> x, y;
  for (int i = 0; i < 4096; ++i) {
    x.insert(x.end(), {i % 64 / 32.0f - 1, i / 64 / 32.0f - 1});
    y.push_back(std::sin(3 * x[2 * i]) * std::cos(2 * x[2 * i + 1]));
  }
  const auto data = data::make_tensor_dataset(
      {{"x", Tensor::of<float>(*host, {4096, 2}, x)}, {"y", Tensor::of<float>(*host, {4096, 1}, y)}});
  return launch(argc, argv, [&](DistributedPtr dist) {
    auto [engine, optimizer, loader, scheduler] = initialize(
        {.dist = dist, .model = make_model, .config = config::parse_text(settings), .training_data = data});
    for (int step = 0; step < 400; ++step) engine->train_batch([&loader = loader] { return loader->next(); });
    if (dist->rank() == 0) std::printf("loss after 400 steps: %.6f\n", engine->last_step().loss);
  });
}

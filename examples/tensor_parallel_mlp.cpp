// An MLP of one's own whose ranks share its layers: each holds a part of every large weight, and all see the
// same data.
//
//   build/examples/tensor_parallel_mlp SHARING [--ranks N]      e.g.  2 --ranks 4: two pairs, a model each
#include <sherd/sherd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

using namespace sherd;

/// x -> h -> h + W2·gelu(W1·h) -> y. One rank alone builds the same with an empty layout.
class Mlp : public nn::Model {
 public:
  explicit Mlp(const parallel::Layout& layout)
      : in_(add("in", std::make_shared<nn::Linear>(2, 32))),
        up_(add("up", std::make_shared<parallel::ColumnLinear>(
                          32, 128, layout, nn::LinearOptions{.activation = tensor::Activation::gelu_tanh}))),
        down_(add("down", std::make_shared<parallel::RowLinear>(128, 32, layout))),
        out_(add("out", std::make_shared<nn::Linear>(32, 1))) {}

 protected:
  Var forward(Tape& tape, const Batch& batch) override {
    const Var h = (*in_)(tape, tape.input(batch.at("x")));
    const Var y = (*out_)(tape, autograd::add(h, (*down_)(tape, (*up_)(tape, h))));
    return autograd::mean_squared_error(y, batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Layer> in_, up_, down_, out_;
};

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: tensor_parallel_mlp SHARING [--ranks N]\n"), 2;
  // Rows of this model are samples, not tokens of a sequence: all ranks keep them whole.
  const std::string settings =
      cat(R"({"train_batch_size": 64, "parallel": {"sequence_parallel": false, "tensor": )",
          std::atoi(argv[1]), R"(}, "zero_optimization": {"stage": 3},
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
    auto [engine, optimizer, loader, scheduler] =
        initialize({.dist = dist,
                    .model = [](const parallel::Layout& layout) { return std::make_shared<Mlp>(layout); },
                    .config = config::parse_text(settings),
                    .training_data = data});
    for (int step = 0; step < 600; ++step) engine->train_batch([&loader = loader] { return loader->next(); });
    if (dist->rank() == 0) std::printf("loss after 600 steps: %.6f\n", engine->last_step().loss);
  });
}

// A program outside Sherd's tree: fits y = 2x - 1 on two ranks under ZeRO stage 3, with an installed Sherd.
#include <sherd/sherd.h>

#include <cmath>
#include <cstdio>

using namespace sherd;

class Line : public nn::Model {
 public:
  Line() : linear_(add("linear", std::make_shared<nn::Linear>(1, 1))) {}

 protected:
  Var forward(Tape& tape, const Batch& batch) override {
    return autograd::mean_squared_error((*linear_)(tape, tape.input(batch.at("x"))), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> linear_;
};

constexpr const char* settings = R"({
  "train_batch_size": 16,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0}},
  "zero_optimization": {"stage": 3}
})";

int main() {
  double last_loss = 1;
  try {
    launch_ranks(2, [&](DistributedPtr dist) {
      const auto host = device::make_cpu_device(1);
      std::vector<float> x, y;
      for (int i = 0; i < 64; ++i) x.push_back(i / 32.0f - 1), y.push_back(2 * x.back() - 1);
      const auto data = data::make_tensor_dataset(
          {{"x", Tensor::of<float>(*host, {64, 1}, x)}, {"y", Tensor::of<float>(*host, {64, 1}, y)}});
      auto [engine, optimizer, loader, scheduler] = initialize({.dist = dist,
                                                                .model = std::make_shared<Line>(),
                                                                .config = config::parse_text(settings),
                                                                .training_data = data});
      for (int step = 0; step < 200; ++step)
        engine->train_batch([&loader = loader] { return loader->next(); });
      engine->synchronize();  // a GPU's last update is looked at here
      if (dist->rank() == 0) last_loss = engine->last_step().loss;
    });
  } catch (const Error& error) {
    return std::fprintf(stderr, "hello: %s\n", error.what()), 1;
  }
  std::printf("loss after 200 steps: %.6f\n", last_loss);
  return last_loss < 1e-2 ? 0 : 1;
}

// Save, resume, evaluate and read weights, with an operation of one's own: finds w in y = (w·x)².
//
//   build/examples/resume CONFIG.json FOLDER [--ranks N]        again to go on from where it stopped
#include <sherd/sherd.h>

#include <cstdio>
#include <filesystem>

namespace {

using namespace sherd;

/// x², element by element: forward, and below it the gradient.
Var square(const Var& x) {
  Tape& tape = x.tape();
  const Tensor y = tape.empty(x.shape(), x.dtype());
  tape.kernels().multiply(x.value(), x.value(), y);
  return tape.record(y, {x}, [x = autograd::Saved(x), to = x.grad_ref()](Tape& back, const Tensor& dy) {
    const Tensor dx = back.empty(dy.shape(), dy.dtype());
    back.kernels().multiply(dy, x.get(back), dx);
    back.kernels().scale(dx, 2, dx);
    back.accumulate(to, dx);
  });
}

class Square : public nn::Model {
 public:
  Square() : linear_(add("linear", std::make_shared<nn::Linear>(3, 1, nn::LinearOptions{.bias = false}))) {}

 protected:
  Var forward(Tape& tape, const Batch& batch) override {
    return autograd::mean_squared_error(square((*linear_)(tape, tape.input(batch.at("x")))), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> linear_;
};

/// Samples of y = (w·x)², w = (0.1, 0.2, 0.3).
std::shared_ptr<const data::Dataset> samples(std::int64_t count, std::uint64_t seed, device::Device& device) {
  std::vector<float> x, y;
  for (std::int64_t i = 0; i < 3 * count; ++i)
    x.push_back(uniform_at({seed, 1}, static_cast<std::uint64_t>(i)));
  for (std::size_t i = 0; i < x.size(); i += 3) {
    const float sum = 0.1f * x[i] + 0.2f * x[i + 1] + 0.3f * x[i + 2];
    y.push_back(sum * sum);
  }
  return data::make_tensor_dataset(
      {{"x", Tensor::of<float>(device, {count, 3}, x)}, {"y", Tensor::of<float>(device, {count, 1}, y)}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: resume CONFIG.json FOLDER [--ranks N]\n"), 2;
  const std::filesystem::path folder = argv[2];
  const auto host = device::make_cpu_device(1);
  const auto training = samples(2048, 1, *host), held_out = samples(64, 2, *host);
  return launch(argc, argv, [&](DistributedPtr dist) {
    auto [engine, optimizer, loader, scheduler] =
        initialize({.dist = dist,
                    .model = [] { return std::make_shared<Square>(); },
                    .config = argv[1],
                    .training_data = training});
    if (std::filesystem::exists(folder / "latest")) engine->load_checkpoint(folder);
    for (int step = 0; step < 200; ++step) engine->train_batch([&loader = loader] { return loader->next(); });

    std::vector<Batch> rows;
    for (std::int64_t i = 0; i < held_out->size(); ++i) rows.push_back(held_out->get(i));
    const double loss = engine->eval_batch(data::collate(rows, engine->device()));
    engine->save_checkpoint(folder);

    for (const auto& parameter : engine->module().parameters()) {
      const auto lease = engine->sharded().gather(*parameter);  // on all ranks alike
      const Tensor weights = tensor::to_host(engine->device(), parameter->value);
      if (dist->rank() == 0)
        std::printf("step %lld  held-out loss %.2e  %s = %.3f %.3f %.3f\n",
                    static_cast<long long>(engine->global_steps()), loss, parameter->name.c_str(),
                    weights.data<float>()[0], weights.data<float>()[1], weights.data<float>()[2]);
    }
  });
}

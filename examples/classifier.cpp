// A classifier of one's own, from single operations, trained by a Trainer with accuracy on held-out samples:
// which of four filters has made a noisy sequence of eight vectors. Attention pools the sequence by a learned
// query.
//
//   build/examples/classifier configs/classifier.json [--ranks N]
#include <sherd/sherd.h>

#include <cstdio>

namespace {

using namespace sherd;

constexpr std::int64_t length = 8, width = 6, classes = 4, hidden = 32;

class Classifier : public nn::Model {
 public:
  Classifier()
      : in_(add("in", std::make_shared<nn::Linear>(width, hidden))),
        out_(add("out", std::make_shared<nn::Linear>(hidden, classes))),
        query_(declare("query", {1, 1, 1, hidden}, autograd::Init::normal(0, 0.5))),
        gain_(declare("gain", {hidden}, autograd::Init::ones())) {}

  /// [batch, classes]
  Var logits(Tape& tape, const Batch& batch) {
    const Var x = tape.input(batch.at("x"));
    const std::int64_t rows = x.shape()[0];
    const Var h = autograd::tanh((*in_)(tape, x)), keys = autograd::reshape(h, {rows, length, 1, hidden});
    const Var zeros =
        autograd::scale(autograd::slice(keys, 1, 0, 1), 0);  // that the query repeats over the batch
    const Var query = autograd::add(zeros, tape.parameter(query_));
    const Var pooled = autograd::reshape(
        autograd::attention(query, keys, keys,
                            {.seen = autograd::seen_by_length(tape, batch.at("length"), length)}),
        {rows, hidden});
    const Var gated = autograd::multiply(pooled, autograd::sigmoid(tape.parameter(gain_)));
    return (*out_)(tape, gated);
  }

 protected:
  Var forward(Tape& tape, const Batch& batch) override {
    return autograd::cross_entropy(logits(tape, batch), batch.at("label"));
  }

 private:
  std::shared_ptr<nn::Linear> in_, out_;
  autograd::ParameterPtr query_, gain_;
};

/// Vectors of each class lie around a direction of its own; only the first `length` of them, four to eight,
/// count.
std::shared_ptr<const data::Dataset> samples(std::int64_t count, std::uint64_t seed, device::Device& device) {
  std::vector<float> x;
  std::vector<std::int32_t> labels, lengths;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto draw = philox({seed, 1}, static_cast<std::uint64_t>(i));
    labels.push_back(static_cast<std::int32_t>(draw[0] % classes));
    lengths.push_back(static_cast<std::int32_t>(4 + draw[1] % 5));
    for (std::int64_t k = 0; k < length * width; ++k) {
      const float noise = normal_at({seed, 2}, static_cast<std::uint64_t>(i * length * width + k));
      const float direction =
          normal_at({9, static_cast<std::uint64_t>(labels.back())}, static_cast<std::uint64_t>(k % width));
      x.push_back(k / width < lengths.back() ? direction + 2 * noise : 50 * noise);
    }
  }
  return data::make_tensor_dataset({{"x", Tensor::of<float>(device, {count, length, width}, x)},
                                    {"length", Tensor::of<std::int32_t>(device, {count, 1}, lengths)},
                                    {"label", Tensor::of<std::int32_t>(device, {count}, labels)}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: classifier CONFIG.json [--ranks N]\n"), 2;
  const auto host = device::make_cpu_device(1);
  const auto training = samples(4096, 1, *host), held_out = samples(512, 2, *host);
  return launch(argc, argv, [&](DistributedPtr dist) {
    auto [engine, optimizer, loader, scheduler] =
        initialize({.dist = dist,
                    .model = [] { return std::make_shared<Classifier>(); },
                    .config = argv[1],
                    .training_data = training});
    auto& model = dynamic_cast<Classifier&>(engine->module());
    data::SampleLoader validation(held_out, engine->loader_rank(), {.shuffle = false}, engine->device());
    const auto accuracy = [&](Tape& tape, const Batch& batch, engine::MetricSums& sums) {
      sums.add_accuracy("accuracy", model.logits(tape, batch).value(), batch.at("label"));
    };
    Trainer trainer(*engine, *loader, {.validation = &validation, .metrics = accuracy});
    trainer.run();
    if (dist->rank() == 0 && trainer.validation_loss())
      std::printf("step %lld  validation loss %.4f  accuracy %.3f\n",
                  static_cast<long long>(engine->global_steps()), *trainer.validation_loss(),
                  trainer.metrics().at("accuracy"));
  });
}

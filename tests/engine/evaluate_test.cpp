// Evaluation of more than a loss: metrics that are the same on all ranks and with any number of them, in
// every stage and tier, and predictions.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "autograd/ops.h"
#include "engine/initialize.h"
#include "nn/layered_model.h"
#include "nn/layers.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using engine::MetricMeans;
using engine::MetricSums;
using sherd::testing::expect_error;
using tensor::Batch;
using tensor::Tensor;

constexpr std::int64_t sample_width = 4, classes = 3, samples = 24;

/// Drops out half of what it is given, where the tape trains.
class Drops : public nn::Layer {
 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    return autograd::dropout(x, 0.5f, tape.random.at(1));
  }
};

std::shared_ptr<nn::SequentialModel> classifier() {
  return std::make_shared<nn::SequentialModel>(
      std::vector<std::shared_ptr<nn::Layer>>{std::make_shared<nn::Linear>(sample_width, 8),
                                              std::make_shared<Drops>(),
                                              std::make_shared<nn::Linear>(8, classes)},
      [](nn::Tape& tape, const Batch& batch) { return tape.input(batch.at("x")); },
      [](const nn::Var& y, const Batch& batch) { return autograd::cross_entropy(y, batch.at("label")); });
}

struct Data {
  std::vector<float> x;
  std::vector<std::int32_t> label;
  std::shared_ptr<const data::Dataset> set;
};
Data make_data(device::Device& host) {
  Data out;
  for (std::int64_t i = 0; i < samples * sample_width; ++i)
    out.x.push_back(normal_at({3, 4}, static_cast<std::uint64_t>(i)));
  for (std::int64_t i = 0; i < samples; ++i)
    out.label.push_back(
        static_cast<std::int32_t>(philox({3, 5}, static_cast<std::uint64_t>(i))[0] % classes));
  out.set = data::make_tensor_dataset({{"x", Tensor::of<float>(host, {samples, sample_width}, out.x)},
                                       {"label", Tensor::of<std::int32_t>(host, {samples}, out.label)}});
  return out;
}

/// An evaluation's results on every rank, and rank 0's first predictions.
struct SeenEvaluation {
  std::vector<MetricMeans> means;
  std::vector<Tensor> predicted;
};

SeenEvaluation evaluate(const Data& data, int ranks, const std::string& sections, bool train_first = false) {
  const config::Config config =
      config::parse_text(cat(R"({"train_batch_size": 4, "train_micro_batch_size_per_gpu": )",
                             sections.find("pipeline") == std::string::npos ? 4 / ranks : 4,
                             sections.empty() ? "" : ", ", sections, "}"));
  SeenEvaluation seen;
  std::mutex mutex;
  const auto host = device::make_cpu_device(1);
  launch_ranks(ranks, [&](DistributedPtr dist) {
    auto made = initialize({.dist = dist,
                            .model = [] { return classifier(); },
                            .config = config,
                            .training_data = data.set,
                            .loader_options = {.shuffle = false}});
    Engine& engine = *made.engine;
    auto& model = dynamic_cast<nn::SequentialModel&>(engine.module());
    if (train_first) engine.train_batch([&] { return made.loader->next(); });
    const std::int64_t position = made.loader->position();
    const MetricMeans means =
        engine.evaluate(*made.loader, [&](nn::Tape& tape, const Batch& batch, MetricSums& sums) {
          EXPECT_FALSE(tape.recording());
          EXPECT_FALSE(tape.training);
          const nn::Var y = model.outputs(tape, batch);
          if (!y.defined()) return;  // another stage has it
          sums.add_accuracy("accuracy", y.value(), batch.at("label"));
          sums.add("sum", autograd::sum(y).value(), static_cast<double>(y.value().numel()));
          sums.add("first label", *batch.at("label").data<std::int32_t>());
          sums.add("nothing", 0, 0);
        });
    EXPECT_EQ(made.loader->position(), position);
    made.loader->seek(0);
    const Batch batch = made.loader->next();
    const Tensor predicted =
        engine.predict(batch, [&](nn::Tape& tape, const Batch& b) { return model.outputs(tape, b); });
    const std::lock_guard lock(mutex);
    seen.means.push_back(means);
    if (dist->rank() == 0 || engine.stages().stages > 1) seen.predicted.push_back(predicted);
  });
  return seen;
}

TEST(Evaluate, MetricsAreTheSameOnAllRanksAndForAnyNumberOfThem) {
  const auto host = device::make_cpu_device(1);
  const Data data = make_data(*host);
  testing::TempFolder folder;
  const std::string nvme = cat(R"("bf16": {"enabled": true}, "optimizer": {"type": "Adam"}, )",
                               R"("zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", )",
                               R"("nvme_path": ")", folder.path().string(), R"("}})");
  const std::string sections[] = {R"("zero_optimization": {"stage": 0})",
                                  R"("zero_optimization": {"stage": 3})",
                                  R"("zero_optimization": {"stage": 2})"};
  std::map<std::string, double> first;
  for (const std::string& section : sections)
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(cat(section, " on ", ranks));
      const SeenEvaluation seen = evaluate(data, ranks, section);
      ASSERT_EQ(std::ssize(seen.means), ranks);
      for (const MetricMeans& means : seen.means) {
        EXPECT_EQ(means.size(), 4u);
        if (first.empty()) first = means;
        EXPECT_EQ(means.at("accuracy"), first.at("accuracy"));
        EXPECT_NEAR(means.at("sum"), first.at("sum"), 1e-7) << "sums of other batches round elsewhere";
        EXPECT_EQ(means.at("nothing"), 0);
        EXPECT_EQ(means, seen.means.front());
      }
    }
  const SeenEvaluation stored = evaluate(data, 2, nvme),
                       kept = evaluate(data, 2, R"("bf16": {"enabled": true})");
  EXPECT_EQ(stored.means, kept.means);
}

TEST(Evaluate, GivesWhatAPersonCountsByHand) {
  const auto host = device::make_cpu_device(1);
  const Data data = make_data(*host);
  const SeenEvaluation seen = evaluate(data, 2, R"("zero_optimization": {"stage": 3})", true);
  // Labels of the first rows of each rank's batches of two samples.
  double labels = 0;
  for (std::size_t i = 0; i < samples; i += 2) labels += data.label[i];
  EXPECT_DOUBLE_EQ(seen.means[0].at("first label"), labels / (samples / 2));
  ASSERT_EQ(seen.predicted[0].shape(), (tensor::Shape{2, classes}));
  // All 24 predictions of a model on one rank, counted here.
  const config::Config config = config::parse_text(R"({"train_batch_size": 24})");
  launch_ranks(1, [&](DistributedPtr dist) {
    auto made = initialize({.dist = dist,
                            .model = [] { return classifier(); },
                            .config = config,
                            .training_data = data.set,
                            .loader_options = {.shuffle = false}});
    auto& model = dynamic_cast<nn::SequentialModel&>(made.engine->module());
    const Tensor y = made.engine->predict(
        made.loader->next(), [&](nn::Tape& tape, const Batch& b) { return model.outputs(tape, b); });
    std::size_t right = 0;
    double sum = 0;
    for (std::size_t i = 0; i < samples; ++i) {
      const float* row = y.data<float>() + i * classes;
      const auto best = std::max_element(row, row + classes) - row;
      right += best == data.label[i];
      for (int k = 0; k < classes; ++k) sum += static_cast<double>(row[k]);
    }
    const SeenEvaluation untrained = evaluate(data, 4, R"("zero_optimization": {"stage": 1})");
    EXPECT_DOUBLE_EQ(untrained.means[0].at("accuracy"), static_cast<double>(right) / samples);
    EXPECT_NEAR(untrained.means[0].at("sum"), sum / (samples * classes), 1e-6);
    EXPECT_EQ(untrained.predicted[0].data<float>()[0], y.data<float>()[0]);
  });
}

TEST(Evaluate, OnAPipelineAllStagesHaveWhatTheLastOneFinds) {
  const auto host = device::make_cpu_device(1);
  const Data data = make_data(*host);
  const SeenEvaluation whole = evaluate(data, 1, ""),
                       cut = evaluate(data, 2, R"("parallel": {"pipeline": 2})");
  for (const MetricMeans& means : cut.means) EXPECT_EQ(means, whole.means[0]);
  ASSERT_EQ(cut.predicted.size(), 2u);
  for (const Tensor& each : cut.predicted)
    EXPECT_EQ(std::memcmp(each.raw(), whole.predicted[0].raw(), each.bytes()), 0);
}

TEST(MetricSumsTest, AccuracyTakesTheFirstOfTheLargestAndLeavesRowsOut) {
  const auto host = device::make_cpu_device(1);
  launch_ranks(1, [&](DistributedPtr dist) {
    MetricSums sums(*host);
    const Tensor logits = Tensor::of<float>(*host, {4, 2}, std::vector<float>{1, 1, 0, 2, 3, -1, 5, 4});
    const auto labels = [&](const std::vector<std::int32_t>& values) {
      return Tensor::of<std::int32_t>(*host, {std::ssize(values)}, values);
    };
    sums.add_accuracy("a", logits, labels({0, 1, 1, -100}));
    sums.next_batch();
    sums.add("b", 3, 2);
    sums.add("a", 1, 1);
    const MetricMeans means = sums.means(dist->world(), dist->world());
    EXPECT_EQ(means, (MetricMeans{{"a", 3.0 / 4}, {"b", 1.5}}));
    expect_error(ErrorKind::usage, "accuracy: labels must be int32, one for each row of the logits [4, 2]",
                 [&] { sums.add_accuracy("a", logits, labels({1})); });
  });
}

}  // namespace
}  // namespace sherd::test

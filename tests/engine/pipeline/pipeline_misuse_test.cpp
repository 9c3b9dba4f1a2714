// Errors for stages or schedules that a model of one's own, or forward(), cannot have.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "engine/initialize.h"
#include "nn/layered_model.h"
#include "nn/layers.h"
#include "support/expect_error.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using tensor::Tensor;

constexpr std::int64_t part_width = 4, batch_rows = 3;

std::shared_ptr<nn::Model> layers() {
  std::vector<std::shared_ptr<nn::Layer>> all;
  for (int i = 0; i < 4; ++i) all.push_back(std::make_shared<nn::Linear>(part_width, part_width));
  return std::make_shared<nn::SequentialModel>(
      all, [](nn::Tape& tape, const tensor::Batch& batch) { return tape.input(batch.at("x")); },
      [](const nn::Var& y, const tensor::Batch& batch) {
        return autograd::mean_squared_error(y, batch.at("y"));
      });
}

/// A model that offers no parts.
class Whole : public nn::Model {
 public:
  Whole() : layer_(add("layer", std::make_shared<nn::Linear>(part_width, part_width))) {}

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    return autograd::mean_squared_error((*layer_)(tape, tape.input(batch.at("x"))), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> layer_;
};

config::Config configuration(int stages, const std::string& schedule = "auto") {
  return config::parse_text(cat(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
      "parallel": {"schedule": ")",
                                schedule, R"(", "pipeline": )", stages, "}}"));
}

tensor::Batch a_batch(device::Device& device) {
  const std::vector<float> values(batch_rows * part_width, 0.5f);
  tensor::Batch batch;
  for (const char* name : {"x", "y"})
    batch[name] = Tensor::of<float>(device, {batch_rows, part_width}, values);
  return batch;
}

TEST(PipelineOfOnesOwn, NeedsAModelOfParts) {
  expect_error(
      ErrorKind::config, "the model offers no parts to cut it between: derive it from nn::LayeredModel", [] {
        launch_ranks(2, [](DistributedPtr dist) {
          initialize(
              {.dist = dist, .model = [] { return std::make_shared<Whole>(); }, .config = configuration(2)});
        });
      });
  expect_error(ErrorKind::config, "parallel.schedule is layered, and the model offers no list of parts", [] {
    launch_ranks(1, [](DistributedPtr dist) {
      initialize({.dist = dist,
                  .model = [] { return std::make_shared<Whole>(); },
                  .config = configuration(1, "layered")});
    });
  });
}

TEST(PipelineOfOnesOwn, IsTrainedByWholeSteps) {
  launch_ranks(2, [](DistributedPtr dist) {
    const auto made = initialize({.dist = dist, .model = layers, .config = configuration(2)});
    Engine& engine = *made.engine;
    const auto forward = [&] { engine.forward(a_batch(engine.device())); };
    expect_error(ErrorKind::usage,
                 "forward() on a pipeline of 2 stages, each of which has a part of the model: "
                 "call train_batch()",
                 forward);
    engine.train_batch([&] { return a_batch(engine.device()); });  // nothing is broken
    EXPECT_EQ(engine.global_steps(), 1);
  });
  for (const char* schedule : {"layered", "gpipe", "auto", "accumulate"})
    launch_ranks(1, [&](DistributedPtr dist) {
      const auto made = initialize({.dist = dist, .model = layers, .config = configuration(1, schedule)});
      Engine& engine = *made.engine;
      const auto forward = [&] { engine.backward(engine.forward(a_batch(engine.device()))); };
      if (schedule == std::string("auto") || schedule == std::string("accumulate")) return forward();
      expect_error(ErrorKind::usage, "this parallel.schedule whole steps: call train_batch()", forward);
      engine.eval();
      engine.forward(a_batch(engine.device()));
    });
}

}  // namespace
}  // namespace sherd::test

// A model of one's own over samples in fp32, as the README has it, in every precision: it must find the line
// that the samples lie on.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "engine/initialize.h"
#include "nn/layers.h"

namespace sherd::test {
namespace {

using tensor::Tensor;

class OwnLine : public nn::Model {
 public:
  OwnLine() : linear_(add("linear", std::make_shared<nn::Linear>(1, 1))) {}
  const nn::Linear& linear() const { return *linear_; }

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    return autograd::mean_squared_error((*linear_)(tape, tape.input(batch.at("x"))), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> linear_;
};

/// Points of y = 2x - 1, all in fp32.
std::shared_ptr<const data::Dataset> points(device::Device& host) {
  std::vector<float> x, y;
  for (int i = 0; i < 64; ++i) x.push_back(static_cast<float>(i) / 32.0f - 1), y.push_back(2 * x.back() - 1);
  return data::make_tensor_dataset(
      {{"x", Tensor::of<float>(host, {64, 1}, x)}, {"y", Tensor::of<float>(host, {64, 1}, y)}});
}

class OwnModel : public ::testing::TestWithParam<const char*> {};

TEST_P(OwnModel, FindsTheLineThatFloatSamplesLieOn) {
  const std::string precision = GetParam();
  const std::string section = precision == "fp32" ? "" : cat(R"(")", precision, R"(": {"enabled": true},)");
  const config::Config config = config::parse_text(
      cat(R"({)", section, R"("train_batch_size": 16, "zero_optimization": {"stage": 3}, )",
          R"("optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0}}})"));
  const auto host = device::make_cpu_device(1);
  launch_ranks(2, [&](DistributedPtr dist) {
    const auto line = std::make_shared<OwnLine>();
    auto made = initialize({.dist = dist, .model = line, .config = config, .training_data = points(*host)});
    for (int step = 0; step < 200; ++step) made.engine->train_batch([&] { return made.loader->next(); });
    EXPECT_LT(made.engine->last_step().loss, 1e-3);
    const auto value = [&](const autograd::ParameterPtr& parameter) {
      const auto lease = made.engine->sharded().gather(*parameter);
      const Tensor wide = Tensor::empty(made.engine->device(), {1}, DType::f32);
      made.engine->kernels().copy(parameter->value, wide);
      return tensor::scalar_value(wide);
    };
    EXPECT_NEAR(value(line->linear().weight()), 2, 0.05);
    for (const auto& parameter : line->parameters())
      if (parameter->name == "linear.bias") {
        EXPECT_NEAR(value(parameter), -1, 0.05);
      }
  });
}

INSTANTIATE_TEST_SUITE_P(InEveryPrecision, OwnModel, ::testing::Values("fp32", "bf16", "fp16"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace sherd::test

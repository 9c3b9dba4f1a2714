#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "config/config.h"
#include "engine/engine.h"
#include "nn/layers.h"

/// Small models that are shaped unlike a stack of equal blocks.
namespace sherd::test {

/// Three blocks of which the last two share one weight, the first may be frozen; parameters outside blocks
/// too.
class Odd : public nn::Model {
 public:
  explicit Odd(bool freeze_first = false, bool skip_last = false) : skip_last_(skip_last) {
    for (int i = 0; i < 3; ++i) {
      nn::LinearOptions options;
      if (i == 2) options.tied = layers_[1]->weight();
      layers_.push_back(add("layer" + std::to_string(i), std::make_shared<nn::Linear>(8, 8, options)));
      layers_.back()->mark_block();
    }
    if (freeze_first) layers_[0]->freeze();
    out_ = add("out", std::make_shared<nn::Linear>(8, 1));
  }
  const nn::Linear& layer(int i) const { return *layers_[static_cast<std::size_t>(i)]; }

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    nn::Var x = tape.input(batch.at("x"));
    for (std::size_t i = 0; i < layers_.size() - (skip_last_ ? 1 : 0); ++i)
      x = autograd::tanh((*layers_[i])(tape, x));
    return autograd::mean_squared_error((*out_)(tape, x), batch.at("y"));
  }

 private:
  bool skip_last_;
  std::vector<std::shared_ptr<nn::Linear>> layers_;
  std::shared_ptr<nn::Linear> out_;
};

/// An identity whose backward fails or does something once it is told to: when later blocks have handed in
/// their gradients, and earlier ones have not.
class Brittle : public nn::Model {
 public:
  Brittle() {
    for (int i = 0; i < 3; ++i) {
      layers_.push_back(add("layer" + std::to_string(i), std::make_shared<nn::Linear>(8, 8)));
      layers_.back()->mark_block();
    }
    out_ = add("out", std::make_shared<nn::Linear>(8, 1));
  }
  bool fails = false;
  std::function<void()> in_backward;

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    nn::Var x = tape.input(batch.at("x"));
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      x = autograd::tanh((*layers_[i])(tape, x));
      if (i != 0) continue;
      x = tape.record(x.value(), {x}, [this, to = x.grad_ref()](nn::Tape& backward, tensor::Tensor dy) {
        require(!fails, "this pass was to fail");
        if (in_backward) in_backward();
        backward.accumulate(to, std::move(dy));
      });
    }
    return autograd::mean_squared_error((*out_)(tape, x), batch.at("y"));
  }

 private:
  std::vector<std::shared_ptr<nn::Linear>> layers_;
  std::shared_ptr<nn::Linear> out_;
};

/// A block that only some micro-batches run through.
class Sometimes : public nn::Model {
 public:
  Sometimes() {
    always_ = add("always", std::make_shared<nn::Linear>(8, 8));
    sometimes_ = add("sometimes", std::make_shared<nn::Linear>(8, 8));
    out_ = add("out", std::make_shared<nn::Linear>(8, 1));
    always_->mark_block();
    sometimes_->mark_block();
  }
  const autograd::ParameterPtr& weight() const { return sometimes_->weight(); }

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    nn::Var x = autograd::tanh((*always_)(tape, tape.input(batch.at("x"))));
    if (batch.contains("deep")) x = autograd::tanh((*sometimes_)(tape, x));
    return autograd::mean_squared_error((*out_)(tape, x), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> always_, sometimes_, out_;
};

inline config::Config odd_config(int stage, const std::string& more = "", const std::string& zero = "") {
  return config::parse_text(
      cat(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},)",
          R"("zero_optimization": {"stage": )", stage, R"(, "stage3_param_persistence_threshold": 0)",
          zero.empty() ? "" : ", ", zero, "}", more, "}"));
}

/// In the engine's compute dtype.
inline tensor::Batch odd_batch(Engine& engine, int step, float y = 0.5f) {
  const auto tensor_of = [&](const tensor::Shape& shape, const std::vector<float>& values) {
    if (engine.config().precision.compute == DType::f32)
      return tensor::Tensor::of<float>(engine.device(), shape, values);
    const std::vector<bf16> narrow(values.begin(), values.end());
    return tensor::Tensor::of<bf16>(engine.device(), shape, narrow);
  };
  std::vector<float> x;
  for (int i = 0; i < 32; ++i)
    x.push_back(uniform_at({3, static_cast<std::uint64_t>(step * 8 + engine.dist().rank())},
                           static_cast<std::uint64_t>(i)));
  return {{"x", tensor_of({4, 8}, x)}, {"y", tensor_of({4, 1}, std::vector<float>(4, y))}};
}

}  // namespace sherd::test

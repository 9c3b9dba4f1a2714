#pragma once

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "nn/layered_model.h"

namespace sherd::test {

/// A layer that computes nothing, and takes as long for forward as for the gradient of its input and for its
/// weight's. Sleeping needs no core, so that many ranks take as long as one.
class Sleeper final : public nn::Layer {
 public:
  explicit Sleeper(std::chrono::milliseconds each)
      : each_(each), weight_(declare("weight", {64}, nn::Init::zeros())) {}

 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    std::this_thread::sleep_for(each_);
    const nn::Var weight = tape.parameter(weight_);
    const tensor::Tensor y = tape.empty(x.shape(), x.dtype());
    tape.kernels().copy(x.value(), y);
    return tape.record(
        y, {x, weight},
        [each = each_, dx = x.grad_ref(), dw = weight.grad_ref()](nn::Tape& t, tensor::Tensor dy) {
          t.weight_gradient(dw, [each, dw](nn::Tape& later) {
            std::this_thread::sleep_for(each);
            const tensor::Tensor none = later.empty({64}, DType::f32);
            later.kernels().fill(none, 0);
            later.accumulate(dw, none);
          });
          std::this_thread::sleep_for(each);
          if (dx) t.accumulate(dx, std::move(dy));
        });
  }

 private:
  std::chrono::milliseconds each_;
  nn::ParameterPtr weight_;
};

/// `layers` of them; the loss is 0.
inline std::shared_ptr<nn::Model> sleeping_model(int layers, std::chrono::milliseconds each) {
  std::vector<std::shared_ptr<nn::Layer>> all;
  for (int i = 0; i < layers; ++i) all.push_back(std::make_shared<Sleeper>(each));
  return std::make_shared<nn::SequentialModel>(
      all, [](nn::Tape& tape, const tensor::Batch& batch) { return tape.input(batch.at("x")); },
      [](const nn::Var& y, const tensor::Batch&) {
        const tensor::Tensor loss = y.tape().empty({1}, DType::f32);
        y.tape().kernels().fill(loss, 0);
        return y.tape().record(loss, {y},
                               [dx = y.grad_ref(), shape = y.shape()](nn::Tape& tape, const tensor::Tensor&) {
                                 const tensor::Tensor none = tape.empty(shape, DType::f32);
                                 tape.kernels().fill(none, 0);
                                 tape.accumulate(dx, none);
                               });
      });
}

}  // namespace sherd::test

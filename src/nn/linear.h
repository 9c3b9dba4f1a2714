#pragma once

#include <optional>

#include "nn/module.h"
#include "tensor/kernels.h"

namespace sherd::nn {

struct LinearOptions {
  bool bias = true;
  tensor::Activation activation = tensor::Activation::none;  ///< fused into the product
  std::optional<Init> init{};                                ///< of the weight; default uniform in ±1/√in
  autograd::Packing packing{};                               ///< of the weight's outputs, and the bias's
  ParameterPtr tied{};  ///< use this weight, shape [out, in], of another module
};

/// act(x·weightᵀ + bias). Parameters: "weight" [out, in]; "bias" [out], zero at first unless `init` is left
/// to the default, which draws it like the weight; no weight decay on it.
class Linear : public Layer {
 public:
  Linear(std::int64_t in, std::int64_t out, LinearOptions options = {});
  const ParameterPtr& weight() const { return weight_; }
  const ParameterPtr& bias() const { return bias_; }  ///< null without one

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  tensor::Activation activation_;
  ParameterPtr weight_, bias_;
};

}  // namespace sherd::nn

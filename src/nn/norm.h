#pragma once

#include "nn/module.h"

namespace sherd::nn {

/// autograd::layer_norm with parameters "weight" (ones) and "bias" (zeros), [width], both without weight
/// decay.
class LayerNorm : public Layer {
 public:
  explicit LayerNorm(std::int64_t width, double eps = 1e-5);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  double eps_;
  ParameterPtr weight_, bias_;
};

/// autograd::rms_norm with parameter "weight" (ones), [width], without weight decay.
class RmsNorm : public Layer {
 public:
  explicit RmsNorm(std::int64_t width, double eps = 1e-5);

  const ParameterPtr& weight() const { return weight_; }

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  double eps_;
  ParameterPtr weight_;
};

}  // namespace sherd::nn

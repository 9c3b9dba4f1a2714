#include "nn/linear.h"

#include <cmath>
#include <utility>

#include "autograd/linear.h"

namespace sherd::nn {

Linear::Linear(std::int64_t in, std::int64_t out, LinearOptions options) : activation_(options.activation) {
  require(in > 0 && out > 0, "a linear layer from ", in, " to ", out, " features");
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  if (options.tied) {
    require(options.tied->shape == Shape{out, in}, "a weight of shape ", options.tied->shape.str(),
            " cannot serve a linear layer from ", in, " to ", out, " features");
    weight_ = share("weight", options.tied);
  } else {
    weight_ = declare("weight", {out, in}, options.init.value_or(Init::uniform(-bound, bound)));
    weight_->packing = options.packing;
  }
  if (!options.bias) return;
  bias_ =
      declare("bias", {out}, options.init ? Init::zeros() : Init::uniform(-bound, bound), {.decay = false});
  bias_->packing = std::move(options.packing);
}

Var Linear::forward(Tape& tape, const Var& x) {
  return autograd::linear(x, tape.parameter(weight_), bias_ ? tape.parameter(bias_) : Var(), activation_);
}

}  // namespace sherd::nn

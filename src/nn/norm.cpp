#include "nn/norm.h"

#include "autograd/norm.h"

namespace sherd::nn {

LayerNorm::LayerNorm(std::int64_t width, double eps)
    : eps_(eps),
      weight_(declare("weight", {width}, Init::ones(), {.decay = false})),
      bias_(declare("bias", {width}, Init::zeros(), {.decay = false})) {}

Var LayerNorm::forward(Tape& tape, const Var& x) {
  return autograd::layer_norm(x, tape.parameter(weight_), tape.parameter(bias_), eps_);
}

RmsNorm::RmsNorm(std::int64_t width, double eps)
    : eps_(eps), weight_(declare("weight", {width}, Init::ones(), {.decay = false})) {}

Var RmsNorm::forward(Tape& tape, const Var& x) {
  return autograd::rms_norm(x, tape.parameter(weight_), eps_);
}

}  // namespace sherd::nn

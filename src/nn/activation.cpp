#include "nn/activation.h"

#include "autograd/elementwise.h"

namespace sherd::nn {

Var Gelu::forward(Tape&, const Var& x) {
  return autograd::activation(x, kind_);
}
Var Relu::forward(Tape&, const Var& x) {
  return autograd::relu(x);
}
Var Tanh::forward(Tape&, const Var& x) {
  return autograd::tanh(x);
}
Var Swiglu::forward(Tape&, const Var& x) {
  return autograd::swiglu(x);
}

}  // namespace sherd::nn

#pragma once

#include "nn/module.h"
#include "tensor/kernels.h"

namespace sherd::nn {

/// GELU; the tanh approximation unless asked for the exact one. Linear fuses it where it follows a product.
class Gelu : public Layer {
 public:
  explicit Gelu(tensor::Activation kind = tensor::Activation::gelu_tanh) : kind_(kind) {}

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  tensor::Activation kind_;
};

class Relu : public Layer {
 protected:
  Var forward(Tape& tape, const Var& x) override;
};

class Tanh : public Layer {
 protected:
  Var forward(Tape& tape, const Var& x) override;
};

/// silu(gate)·up of [gate | up]: halves the last extent.
class Swiglu : public Layer {
 protected:
  Var forward(Tape& tape, const Var& x) override;
};

}  // namespace sherd::nn

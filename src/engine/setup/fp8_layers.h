#pragma once

#include <memory>
#include <string>
#include <vector>

#include "autograd/linear_products.h"
#include "config/config.h"
#include "nn/module.h"
#include "tensor/kernels.h"

namespace sherd::engine {

/// A linear layer's name: its weight's, without ".weight".
std::string layer_of(const std::string& weight);

/// The linear layers of this rank's model whose products run in FP8, and what they lose.
class Fp8Layers {
 public:
  /// Finds the weights of linear layers (Parameter::in_linear) that `fp8` does not exclude and whose
  /// features, on this rank, are multiples of 16, as GPUs need them. Throws Error{config} for a pattern that
  /// matches none, and on a GPU that has no such products.
  Fp8Layers(const nn::Module& model, const config::Fp8& fp8, tensor::Kernels& kernels);
  /// Sets their Parameter::fp8, once the model is this engine's, until this goes. Throws Error{config} where
  /// there are none.
  void adopt();
  ~Fp8Layers();
  Fp8Layers(const Fp8Layers&) = delete;
  Fp8Layers& operator=(const Fp8Layers&) = delete;

  bool enabled() const { return layer_ != nullptr; }
  const std::vector<nn::ParameterPtr>& weights() const { return weights_; }
  /// Which run in FP8 and which do not; empty where not enabled.
  std::string describe() const;

  /// Elements that were quantised since the last call, on this rank, and what was lost of them.
  struct Lost {
    std::int64_t elements = 0, not_finite = 0;
    std::int64_t to_zero = 0;  ///< that became zero and were not
  };
  /// Waits for the device.
  Lost take_lost();

  /// Has products compared from here on (autograd::Fp8Layer::compare); empty: no more.
  using Compare = decltype(autograd::Fp8Layer::compare);
  void set_compare(Compare compare);

 private:
  std::string recipe_;
  tensor::Kernels& kernels_;
  std::shared_ptr<autograd::Fp8Layer> layer_;
  std::vector<nn::ParameterPtr> weights_;
  std::vector<std::string> excluded_, odd_;
  bool adopted_ = false;
};

}  // namespace sherd::engine

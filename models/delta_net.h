#pragma once

#include "models/gpt_config.h"
#include "nn/layers.h"
#include "sharding/parallel/linear.h"

namespace sherd::models {

using autograd::Tape;
using autograd::Var;

/// Linear attention by the gated delta rule (tensor::DeltaRule), as Qwen3-Next's layers of type
/// linear_attention have it: a projection to queries, keys and values, a short convolution, the rule, a norm
/// of each value head times the silu of another projection, and a projection back.
///
/// Parts: "qkv" [width, hidden], of each key head its query, its key and its value heads' values; "z"
/// [value_width, hidden]; "ba" [2·value_heads, hidden], of each key head its value heads' b, then their a;
/// "conv" [width, 1, taps]; "a_log", "dt_bias" [value_heads]; "norm" [value_head_dim]; "projection". Tensor
/// ranks have their own key heads. Context ranks, whose rows would wait for each other's states, do not share
/// it: Gpt refuses them by name.
class DeltaNet : public nn::Layer {
 public:
  /// `config` must be resolved, with a section linear_attention.
  DeltaNet(const GptConfig& config, const parallel::Layout& layout);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  tensor::DeltaRule rule_;  ///< of this rank's heads
  std::int64_t value_dim_;
  std::shared_ptr<parallel::ColumnLinear> qkv_, z_, ba_;
  std::shared_ptr<parallel::RowLinear> projection_;
  std::shared_ptr<nn::RmsNorm> norm_;
  nn::ParameterPtr conv_, a_log_, dt_bias_;
};

}  // namespace sherd::models

#pragma once

#include "models/gpt_config.h"
#include "models/relative_attention.h"
#include "nn/layers.h"
#include "sharding/parallel/adapters/bottleneck.h"
#include "sharding/parallel/attention.h"
#include "sharding/parallel/experts/moe.h"
#include "sharding/parallel/linear.h"

namespace sherd::models {

using autograd::Tape;
using autograd::Var;

/// Self-attention with grouped queries, causal or not. Parts: "qkv" (one packed projection, grouped per
/// key-value head as tensor::Attention says), "projection", and "dropout" which names the stream of the
/// scores' mask, with qk_norm "q_norm" and "k_norm", with attention_sinks "sinks" [heads], and with
/// attention_gate "gate" [heads·head_dim, hidden], by whose sigmoid what attention finds is multiplied.
/// Tensor ranks have their own heads, context ranks their own queries.
class SelfAttention : public nn::Layer {
 public:
  /// `config` must be resolved; `layer`: the index of its block, as what blocks see may differ.
  SelfAttention(const GptConfig& config, std::int64_t layer, const parallel::Layout& layout);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  parallel::Layout layout_;
  tensor::Attention geometry_;
  std::optional<tensor::Rotary> rotary_;
  double norm_eps_, norm_shift_;
  std::shared_ptr<parallel::ColumnLinear> qkv_, gate_;  ///< gate_: null without attention_gate
  std::shared_ptr<parallel::RowLinear> projection_;
  std::shared_ptr<nn::Dropout> dropout_;
  std::shared_ptr<nn::RmsNorm> query_norm_, key_norm_;  ///< null without qk_norm
  nn::ParameterPtr sinks_;                              ///< null without attention_sinks
};

/// The feed-forward part. Parts: "up" (for SwiGLU [gate; up] fused, gate first), "down", and with ffn_dropout
/// "dropout".
class FeedForward : public nn::Layer {
 public:
  /// `path`: in the model, "blocks.0.mlp", by which `config` knows its layers' adapters; empty: they have
  /// none.
  FeedForward(const GptConfig& config, std::int64_t width, const std::string& path,
              const parallel::Layout& layout);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  parallel::Layout layout_;
  bool gated_;
  int relu_;  ///< to which power; 0: the product has another function, or none
  tensor::Glu glu_;
  std::shared_ptr<parallel::ColumnLinear> up_;
  std::shared_ptr<parallel::RowLinear> down_;
  std::shared_ptr<nn::Dropout> dropout_;  ///< null: none
};

/// Experts, and where there is one a feed-forward part that all tokens take beside them: "shared", added to
/// what they make, times sigmoid(x·wᵀ) with w "shared_gate.weight" [1, hidden] where it has a gate; or
/// "dense", where the two are weighed by a softmax of "coefficient", a linear layer of two outputs.
class ExpertsAndShared : public parallel::Moe {
 public:
  /// `path`: in the model, "blocks.0.mlp".
  ExpertsAndShared(const GptConfig& config, const std::string& path, const parallel::Layout& layout,
                   std::shared_ptr<parallel::PooledChoices> pooled);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  std::shared_ptr<FeedForward> shared_, dense_;
  std::shared_ptr<nn::Linear> shared_gate_, coefficient_;
};

/// One block: x + attention(x), then x + mlp(x), where norms stand before these, behind them, on both sides,
/// or behind the sums (config::NormPlacement). Parts: "norm_1", "attention", "post_norm_1",
/// "attention_dropout", "norm_2", "mlp", "post_norm_2", "mlp_dropout", and "adapter", bottlenecks behind
/// these. x and the result: this rank's part of the stream [batch, seq, hidden] (parallel::Layout).
///
/// With an encoder in front of a decoder the stream's first rows, encoder.seq_length of them, are the
/// encoder's, and the others the decoder's; a block changes those of its own. A decoder's block has
/// "cross_norm", "cross_attention" to the encoder's rows and "cross_dropout" behind its attention; the
/// encoder's last one ends with "output_norm" and "output_dropout".
class TransformerBlock : public nn::Layer {
 public:
  /// `index`: which of the model's blocks, as some may have experts; `pooled`: as GptConfig::experts() takes
  /// it.
  /// `positions`: the stack's, where they are relative.
  TransformerBlock(const GptConfig& config, std::int64_t index, const parallel::Layout& layout,
                   std::shared_ptr<parallel::PooledChoices> pooled = nullptr,
                   std::shared_ptr<RelativePositions> positions = nullptr);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  /// The block's parts, on rows of its own.
  Var run_parts(Tape& tape, const Var& x, const Var& source);
  /// x plus the output of a part for it, with the part's norms.
  Var added(Tape& tape, parallel::Bottlenecks::BlockPart part, const Var& x);
  /// x plus what a part made of it, and what an adapter makes of that.
  Var joined(Tape& tape, parallel::Bottlenecks::BlockPart part, const Var& x, const Var& y,
             nn::Dropout& dropout);

  parallel::Layout layout_;
  double multiplier_;  ///< factor of the parts' outputs
  bool norms_sums_;    ///< the norms behind parts stand behind the sums
  std::shared_ptr<nn::Layer> norm_1_, norm_2_, post_norm_1_, post_norm_2_;  ///< null: none there
  std::shared_ptr<nn::Layer> attention_, mlp_;
  std::shared_ptr<nn::Dropout> attention_dropout_, mlp_dropout_;
  std::shared_ptr<parallel::Bottlenecks> adapter_;  ///< null: none
  std::int64_t source_rows_;                        ///< of the stream, an encoder's; 0: there is none
  bool encodes_;
  std::shared_ptr<nn::Layer> cross_norm_, output_norm_;  ///< null: none
  std::shared_ptr<RelativeAttention> cross_attention_;   ///< null: none
  std::shared_ptr<nn::Dropout> cross_dropout_, output_dropout_;
};

/// Rows of the stream that are an encoder's in this pass, of a sample's.
std::int64_t source_rows(const Tape& tape, std::int64_t of_a_sample);

/// The norm of the stream that `config` asks for.
std::shared_ptr<nn::Layer> make_norm(const GptConfig& config, const parallel::Layout& layout);

}  // namespace sherd::models

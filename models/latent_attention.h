#pragma once

#include "models/gpt_config.h"
#include "nn/layers.h"
#include "sharding/parallel/attention.h"
#include "sharding/parallel/linear.h"

namespace sherd::models {

using autograd::Tape;
using autograd::Var;

/// Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): a token's keys and values are
/// made of kv_lora_rank numbers, and of qk_rope_head_dim more that turn with its position, which all heads'
/// keys share.
///
/// Parts: "q" [heads·head_dim, hidden], or with a q_lora_rank "q_down" and "q_norm" before "q_up"; "kv_down"
/// [kv_lora_rank + qk_rope_head_dim, hidden], "kv_norm", "kv_up" [heads·(qk_nope_head_dim + v_head_dim),
/// kv_lora_rank]; "projection", and "dropout" of the scores. A head's elements that turn come first. Tensor
/// ranks have their own heads, and all have the parts that go down; context ranks their own queries.
///
/// Training forms each head's keys and values. Generation on processors keeps the kv_lora_rank +
/// qk_rope_head_dim numbers of a token alone: a prompt's rows see each other as in training, and what
/// continues a text has its queries brought to those numbers by the keys' half of kv_up, and what is summed
/// of them brought to values by the other half.
class LatentAttention : public nn::Layer {
 public:
  /// `config` must be resolved, with a section mla; `layer`: the index of its block.
  LatentAttention(const GptConfig& config, std::int64_t layer, const parallel::Layout& layout);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  Var queries(Tape& tape, const Var& x);
  Var whole(Tape& tape, const Var& q, const Var& latent, const Var& turning);
  Var stored(Tape& tape, const Var& q, const Var& latent, const Var& turning);
  tensor::Tensor turned_latents(Tape& tape, const tensor::Tensor& packed, int heads, const Var& latent,
                                const Var& turning);

  parallel::Layout layout_;
  config::Mla sizes_;
  tensor::Attention geometry_;
  std::optional<tensor::Rotary> rotary_;  ///< of head_dim elements
  std::int64_t head_dim_;
  std::shared_ptr<nn::Linear> q_down_, kv_down_;
  std::shared_ptr<nn::RmsNorm> q_norm_, kv_norm_;
  std::shared_ptr<parallel::ColumnLinear> q_, kv_up_;
  std::shared_ptr<parallel::RowLinear> projection_;
  std::shared_ptr<nn::Dropout> dropout_;
};

}  // namespace sherd::models

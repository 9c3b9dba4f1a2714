#pragma once

#include "models/gpt.h"
#include "support/plain_parameters.h"

namespace sherd::test {

/// As it is published.
inline models::GptConfig gpt2_small() {
  models::GptConfig o;
  o.vocab_size = 50257, o.seq_length = 1024, o.hidden_size = 768, o.num_layers = 12, o.num_heads = 12;
  return o;
}

/// GPT-2's style, small enough for central differences.
inline models::GptConfig tiny_gpt2() {
  models::GptConfig o;
  o.vocab_size = 13, o.pad_vocab_to_multiple_of = 8, o.seq_length = 7, o.hidden_size = 6, o.num_layers = 2,
  o.num_heads = 2, o.ffn_hidden_size = 10;
  o.init_std = 0.3;
  return o;
}

/// Llama's style with grouped queries and a head size of its own.
inline models::GptConfig tiny_llama() {
  models::GptConfig o = models::GptConfig::of_family("llama");
  o.vocab_size = 11, o.pad_vocab_to_multiple_of = 4, o.seq_length = 9, o.hidden_size = 6, o.num_layers = 2,
  o.num_heads = 4, o.num_kv_heads = 2;
  o.head_dim = 2, o.ffn_hidden_size = 10, o.init_std = 0.3, o.norm_epsilon = 1e-3;
  return o;
}

/// Gemma 3's style with everything else that a block may have: layers of two kinds with positions of their
/// own, one in three without any, positions of part of a head, and multipliers.
inline models::GptConfig tiny_gemma() {
  using config::LayerType;
  models::GptConfig o = models::GptConfig::of_family("gemma3_text");
  o.vocab_size = 11, o.pad_vocab_to_multiple_of = 4, o.seq_length = 9, o.hidden_size = 6, o.num_layers = 3,
  o.num_heads = 2, o.num_kv_heads = 1;
  o.head_dim = 4, o.ffn_hidden_size = 10, o.init_std = 0.3, o.norm_epsilon = 1e-3;
  o.sliding_window = 3, o.layer_types = {LayerType::sliding_attention, LayerType::full_attention};
  o.rotary_base = 50, o.sliding_rope = config::SlidingRope{20, {RotaryScaling::linear, 2}};
  o.no_rope_layer_interval = 3, o.partial_rotary_factor = 0.5;
  o.embedding_multiplier = 1.5, o.residual_multiplier = 0.7, o.attention_multiplier = 0.4;
  o.logits_scaling = 2;
  return o;
}

/// GPT-OSS's style with scores that are capped as Gemma 2's are; its experts are with_experts()'s.
inline models::GptConfig tiny_gpt_oss() {
  using config::LayerType;
  models::GptConfig o = models::GptConfig::of_family("gpt_oss");
  o.vocab_size = 11, o.pad_vocab_to_multiple_of = 4, o.seq_length = 9, o.hidden_size = 6, o.num_layers = 2,
  o.num_heads = 4, o.num_kv_heads = 2, o.head_dim = 2, o.ffn_hidden_size = 10;
  o.init_std = 0.3, o.norm_epsilon = 1e-3, o.sliding_window = 3;
  o.attn_logit_softcapping = 2, o.final_logit_softcapping = 1.5;
  return o;
}

/// DeepSeek's attention: keys longer than values, of which a part turns, and queries of latents too.
inline models::GptConfig tiny_latents() {
  models::GptConfig o = tiny_llama();
  o.num_kv_heads = o.head_dim = 0;
  o.mla = {
      .kv_lora_rank = 6, .q_lora_rank = 5, .qk_nope_head_dim = 4, .qk_rope_head_dim = 2, .v_head_dim = 5};
  return o;
}

/// Qwen3-Next's style: a layer of linear attention before one of gated attention.
inline models::GptConfig tiny_hybrid() {
  models::GptConfig o = models::GptConfig::of_family("qwen3_5_text");
  o.vocab_size = 11, o.pad_vocab_to_multiple_of = 4, o.seq_length = 9, o.hidden_size = 6, o.num_layers = 2,
  o.num_heads = 2, o.num_kv_heads = 1, o.head_dim = 4, o.ffn_hidden_size = 10;
  o.partial_rotary_factor = 0.5, o.init_std = 0.3, o.norm_epsilon = 1e-3;
  o.layer_types = {config::LayerType::linear_attention, config::LayerType::full_attention};
  o.linear_attention = {
      .num_key_heads = 2, .num_value_heads = 4, .key_head_dim = 8, .value_head_dim = 2, .conv_kernel_dim = 3};
  return o;
}

/// OLMo 2's norms, behind the parts alone.
inline models::GptConfig tiny_post_norms() {
  models::GptConfig o = tiny_llama();
  o.norm_placement = config::NormPlacement::post, o.activation = config::FfnActivation::geglu;
  o.norm_epsilon = 0.1;  // what parts make is small, and differences must see its norm's slope
  return o;
}

/// BERT's style, with a window on both sides in one of two layers.
inline models::GptConfig tiny_bert() {
  using config::LayerType;
  models::GptConfig o = models::GptConfig::of_family("bert");
  o.vocab_size = 13, o.pad_vocab_to_multiple_of = 8, o.seq_length = 7, o.hidden_size = 6, o.num_layers = 2,
  o.num_heads = 2, o.ffn_hidden_size = 10, o.init_std = 0.3, o.norm_epsilon = 1e-3;
  o.sliding_window = 2, o.layer_types = {LayerType::sliding_attention, LayerType::full_attention};
  o.dropout = o.attention_dropout = o.embedding_dropout = 0;
  return o;
}

/// An encoder of two layers in front of a decoder of one, T5's style.
inline models::GptConfig tiny_t5() {
  models::GptConfig o = models::GptConfig::of_family("t5");
  o.vocab_size = 11, o.pad_vocab_to_multiple_of = 4, o.seq_length = 9, o.hidden_size = 6, o.num_layers = 3;
  o.num_heads = 2, o.head_dim = 4, o.ffn_hidden_size = 10, o.norm_epsilon = 1e-3;
  o.encoder = {.num_layers = 2, .seq_length = 3};
  o.relative_attention_num_buckets = 4, o.relative_attention_max_distance = 4;
  o.activation = config::FfnActivation::relu2, o.ffn_dropout = 0.2;
  return o;
}

inline models::GptConfig with_dropout(models::GptConfig o) {
  o.embedding_dropout = 0.1f, o.attention_dropout = 0.2f, o.dropout = 0.3f;
  return o;
}

/// Two virtual tokens in front of texts.
inline models::GptConfig with_prompt(models::GptConfig o) {
  o.adapter.type = config::AdapterType::prompt_tuning, o.adapter.prompt.virtual_tokens = 2;
  return o;
}

/// Experts in its blocks, whose balance loss is no part of the loss that a model gives.
inline models::GptConfig with_experts(models::GptConfig o) {
  o.moe.experts = 4, o.moe.top_k = 2, o.moe.aux_loss = 0;
  return o;
}

inline void set_losses(config::Moe& moe, const parallel::RouterLosses& losses) {
  moe.aux_loss = losses.balance, moe.z_loss = losses.z, moe.aux_loss_type = losses.kind;
}

/// Random tokens and labels, one label ignored.
inline tensor::Batch tiny_batch(Cpu& cpu, const models::GptConfig& o, std::int64_t batch, std::int64_t seq,
                                std::uint64_t seed = 1) {
  tensor::Batch out{{"tokens", cpu.ids({batch, seq}, seed, static_cast<std::int32_t>(o.vocab_size))},
                    {"labels", cpu.ids({batch, seq}, seed + 1, static_cast<std::int32_t>(o.vocab_size))}};
  out["labels"].data<std::int32_t>()[batch * seq - 2] = -100;
  return out;
}

}  // namespace sherd::test

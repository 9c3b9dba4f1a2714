#pragma once

#include "models/gpt.h"
#include "support/plain_parameters.h"

namespace sherd::test {

/// GPT-2's style, small enough for central differences.
inline models::GptOptions tiny_gpt2() {
  models::GptOptions o;
  o.vocab_size = 13, o.vocab_multiple = 8, o.max_seq = 7, o.hidden = 6, o.layers = 2, o.heads = 2,
  o.ffn_hidden = 10;
  o.init_std = 0.3;
  return o;
}

/// Llama's style with grouped queries and a head size of its own.
inline models::GptOptions tiny_llama() {
  models::GptOptions o = models::GptOptions::llama();
  o.vocab_size = 11, o.vocab_multiple = 4, o.max_seq = 9, o.hidden = 6, o.layers = 2, o.heads = 4,
  o.kv_heads = 2;
  o.head_dim = 2, o.ffn_hidden = 10, o.init_std = 0.3, o.norm_eps = 1e-3;
  return o;
}

inline models::GptOptions with_dropout(models::GptOptions o) {
  o.embedding_dropout = 0.1f, o.attention_dropout = 0.2f, o.hidden_dropout = 0.3f;
  return o;
}

/// Two virtual tokens in front of texts.
inline models::GptOptions with_prompt(models::GptOptions o) {
  o.adapter.type = config::AdapterType::prompt_tuning, o.adapter.virtual_tokens = 2;
  return o;
}

/// Experts in its blocks, whose balance loss is no part of the loss that a model gives.
inline models::GptOptions with_experts(models::GptOptions o) {
  o.experts.count = 4, o.experts.routing.top_k = 2, o.experts.losses = {};
  return o;
}

/// Random tokens and labels, one label ignored.
inline tensor::Batch tiny_batch(Cpu& cpu, const models::GptOptions& o, std::int64_t batch, std::int64_t seq,
                                std::uint64_t seed = 1) {
  tensor::Batch out{{"tokens", cpu.ids({batch, seq}, seed, static_cast<std::int32_t>(o.vocab_size))},
                    {"labels", cpu.ids({batch, seq}, seed + 1, static_cast<std::int32_t>(o.vocab_size))}};
  out["labels"].data<std::int32_t>()[batch * seq - 2] = -100;
  return out;
}

}  // namespace sherd::test

#include <cstring>

#include "base/error.h"
#include "models/families/family.h"

namespace sherd::models {

std::string Family::class_of(config::Head head) const {
  const auto named = [](const char* name) { return std::string(name ? name : ""); };
  switch (head) {
    case config::Head::sequence_classification:
      return named(sequence_classifier);
    case config::Head::token_classification:
      return named(token_classifier);
    case config::Head::pretraining:
      return named(pretraining);
    case config::Head::reward:  // transformers' decoders that classify have one name for all families
      for (const char* end : {"ForCausalLM", "LMHeadModel"})
        if (std::string name = architecture; name.ends_with(end))
          return name.substr(0, name.size() - std::strlen(end)) + "ForSequenceClassification";
      return "";
    default:
      return architecture;
  }
}

Family gpt2(), llama(), mistral(), mixtral(), qwen2(), qwen3(), qwen3_moe(), phi3(), gemma2(), gemma3(),
    granite(), gpt_oss(), smollm3(), glm4(), glm4_moe(), deepseek_v2(), deepseek_v3(), qwen2_moe(),
    qwen3_next(), qwen3_5(), qwen3_5_moe(), ministral3(), olmo2(), olmo3(), bert(), modernbert(), t5(), mt5();

const std::vector<Family>& families() {
  static const std::vector<Family> all{
      gpt2(),       llama(),       mistral(),     qwen2(),     qwen3(),      mixtral(), qwen3_moe(),
      phi3(),       granite(),     smollm3(),     gemma2(),    gemma3(),     gpt_oss(), glm4(),
      glm4_moe(),   deepseek_v2(), deepseek_v3(), qwen2_moe(), qwen3_next(), qwen3_5(), qwen3_5_moe(),
      ministral3(), olmo2(),       olmo3(),       bert(),      modernbert(), t5(),      mt5()};
  return all;
}

std::vector<OptionalPart> optional_parts(const config::Model& m) {
  const config::Model plain;
  return {{"sliding_window", m.sliding_window > 0},
          {"layer_types", !m.layer_types.empty()},
          {"linear_attention", m.any_linear()},
          {"sliding_rope", m.sliding_window > 0 && m.sliding_rope},
          {"no_rope_layer_interval", m.no_rope_layer_interval != 0},
          {"partial_rotary_factor", m.partial_rotary_factor != plain.partial_rotary_factor},
          {"llama_4_scaling_beta", m.llama_4_scaling_beta != 0},
          {"token_types", m.token_types > 0},
          {"attn_logit_softcapping", m.attn_logit_softcapping != 0},
          {"final_logit_softcapping", m.final_logit_softcapping != 0},
          {"attention_multiplier", m.attention_multiplier != 0},
          {"embedding_multiplier", m.embedding_multiplier != plain.embedding_multiplier},
          {"residual_multiplier", m.residual_multiplier != plain.residual_multiplier},
          {"logits_scaling", m.logits_scaling != plain.logits_scaling}};
}

std::optional<std::string> lacks_other_heads(const config::Model& m) {
  if (m.head_dim * m.num_heads != m.hidden_size) return "model.head_dim that is not hidden_size/num_heads";
  return std::nullopt;
}

std::optional<std::string> lacks_other_experts(const config::Model& m, bool weights_sum_to_1) {
  const bool sum_to_1 = m.moe.norm_topk || m.moe.router == RouterScores::softmax_of_chosen;
  if (sum_to_1 != weights_sum_to_1) return cat("model.moe.norm_topk ", sum_to_1 ? "true" : "false");
  if (m.moe.every != 1 || m.moe.first_dense != 0) return "blocks without experts";
  return std::nullopt;
}

const Family& family_of(config::ModelType type) {
  for (const Family& family : families())
    if (family.name == config::name_of(type)) return family;
  fail(ErrorKind::usage, "family ", config::name_of(type), " has no file in models/families");
}

}  // namespace sherd::models

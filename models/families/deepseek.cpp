#include <cmath>

#include "models/families/family.h"

// DeepSeek-V2 and DeepSeek-V3: latent attention, and experts in groups beside shared ones.
namespace sherd::models {
namespace {

using M = config::Model;
using L = config::Mla;
using config::Value;

JsonKeys latent_keys() {
  const auto rank = [](const Value& value) {
    return value.node.is(config::Node::Kind::null) ? 0 : value.integer(1, config::most_hidden);
  };
  const auto written = [](const Published& p) {
    return p.model.mla.q_lora_rank > 0 ? config::node_of(p.model.mla.q_lora_rank) : config::Node();
  };
  return {whole("kv_lora_rank", &L::kv_lora_rank, 1, config::most_hidden),
          in_file(config::field_key("q_lora_rank", "", &L::q_lora_rank, rank))
              .written(written)
              .with(config::null_too, config::or_null),
          whole("qk_nope_head_dim", &L::qk_nope_head_dim, 1, config::most_hidden),
          whole("qk_rope_head_dim", &L::qk_rope_head_dim, 2, config::most_hidden),
          whole("v_head_dim", &L::v_head_dim, 1, config::most_hidden),
          idle("qk_head_dim")};
}

JsonKeys deepseek_keys(bool norm_topk) {
  JsonKeys sizes{idle("head_dim")};  // which is that of what turns, and follows
  for (JsonKey& key : decoder_sizes())
    if (key.name != "head_dim") sizes.push_back(std::move(key));
  return joined(std::move(sizes), no_biases(true, false), rope_keys({.mscale = true}), latent_keys(),
                grouped_experts_keys(norm_topk));
}

std::optional<std::string> deepseek_lacks(const M& m) {
  if (m.attention_multiplier != 0 &&
      (m.rope_scaling.type != RotaryScaling::yarn || m.rope_scaling.factor <= 1))
    return "model.attention_multiplier without positions scaled by yarn";
  if (m.attention_multiplier != 0 && m.attention_multiplier * std::sqrt(static_cast<double>(m.head_dim)) <= 1)
    return "model.attention_multiplier of no more than 1/sqrt(head_dim)";
  if (m.mla.norm_epsilon != 1e-6) return "model.mla.norm_epsilon";
  return lacks_grouped_experts(m);
}

/// The first thing that llama.cpp's graph lacks: there yarn's factor belongs to the scores alone, and norms
/// have one epsilon.
std::optional<std::string> lacks_other_latents(const M& m) {
  if (m.norm_epsilon != m.mla.norm_epsilon) return "model.mla.norm_epsilon that is not model.norm_epsilon";
  const config::RopeScaling& rope = m.rope_scaling;
  const bool scaled = rope.type == RotaryScaling::yarn && rope.factor > 1;
  if (scaled && (m.attention_multiplier == 0 || std::abs(rope.attention_factor - 1) > 1e-6))
    return "positions scaled by yarn whose mscale is not mscale_all_dim";
  return std::nullopt;
}

}  // namespace

Family deepseek_v2() {
  // Which of its groups' experts a token takes by: the best of each group, or it has none.
  const auto read = [](Published& p, const Value& value) {
    if (value.node.is_text("greedy")) return void(p.greedy_experts = true);
    if (!value.node.is_text("group_limited_greedy"))
      value.error(value.node.brief(), " is not supported: \"greedy\" and \"group_limited_greedy\" are");
    p.greedy_experts = false;
  };
  const auto written = [](const Published& p) {
    return config::node_of(std::string(p.model.moe.groups > 1 ? "group_limited_greedy" : "greedy"));
  };
  return {.name = "deepseek_v2",
          .architecture = "DeepseekV2ForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {102400, 4096, 11008, 32, 32, 0, 2048});
                p.model.mla.kv_lora_rank = 512, p.model.mla.q_lora_rank = 1536;
                p.model.moe.experts = 64, p.model.moe.top_k = 2, p.model.moe.shared_experts = 2;
                p.model.moe.ffn_hidden_size = 1407, p.model.moe.norm_topk = false;
                p.greedy_experts = true;
              },
          .keys = joined(deepseek_keys(false),
                         JsonKeys{config::custom<Published>("topk_method", "", read, written),
                                  only("scoring_func", equals_text("softmax"), "scores are a softmax")}),
          .names = {.interleaved = true},
          .has = {"moe", "mla", "attention_multiplier"},
          .lacks = [](const M& m) -> std::optional<std::string> {
            if (m.moe.router != RouterScores::softmax) return "model.moe.router that is not \"softmax\"";
            if (m.moe.norm_topk) return "model.moe.norm_topk true";
            if (m.moe.correction_bias) return "model.moe.correction_bias";
            return deepseek_lacks(m);
          },
          .gguf = {.architecture = "deepseek2", .pairs = true, .lacks = [](const M& m) {
                     // Groups are chosen by their two best experts there.
                     if (m.moe.groups > 1) return std::optional<std::string>("model.moe.groups");
                     return lacks_other_latents(m);
                   }}};
}

Family deepseek_v3() {
  return {.name = "deepseek_v3",
          .architecture = "DeepseekV3ForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {129280, 7168, 18432, 61, 128, 128, 4096});
                p.model.mla.kv_lora_rank = 512, p.model.mla.q_lora_rank = 1536;
                p.model.moe.experts = 256, p.model.moe.top_k = 8, p.model.moe.shared_experts = 1;
                p.model.moe.ffn_hidden_size = 2048, p.model.moe.first_dense = 3;
                p.model.moe.groups = 8, p.model.moe.top_groups = 4, p.model.moe.routed_scaling_factor = 2.5;
              },
          .keys = joined(deepseek_keys(true), sigmoid_router_keys(),
                         JsonKeys{only("rope_interleave", is_true, "positions turn pairs of neighbours")}),
          .names = {.interleaved = true, .more_layers = true},
          .has = {"moe", "mla", "attention_multiplier"},
          .lacks = [](const M& m) -> std::optional<std::string> {
            if (auto found = lacks_sigmoid_router(m)) return found;
            return deepseek_lacks(m);
          },
          .gguf = {.architecture = "deepseek2", .pairs = true, .lacks = lacks_other_latents}};
}

}  // namespace sherd::models

#include "models/families/family.h"

// GLM-4 (0414): norms on both sides of a block's parts, and half of a head turns, in pairs of neighbours; and
// GLM-4.5, whose experts are DeepSeek-V3's.
namespace sherd::models {

using M = config::Model;

Family glm4() {
  return {.name = "glm4",
          .architecture = "Glm4ForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {151552, 4096, 13696, 40, 32, 2, 131072});
                p.model.head_dim = 128, p.model.norm_epsilon = 1.5625e-7;
              },
          .keys = joined(decoder_sizes(), rope_keys({.partial = true}),
                         JsonKeys{flag("attention_bias", &M::qkv_bias).written([](const Published& p) {
                           return config::node_of(p.model.qkv_bias);
                         })}),
          .names = {.norm_2 = "post_attention_layernorm",
                    .post_norm_1 = "post_self_attn_layernorm",
                    .post_norm_2 = "post_mlp_layernorm",
                    .up = {"mlp.gate_up_proj"},
                    .interleaved = true},
          .ia3_targets = {"k_proj", "v_proj", "down_proj"},
          .has = {"partial_rotary_factor", "qkv_bias"},
          .gguf = {.architecture = "glm4", .pairs = true, .packed_up = true}};
}

Family glm4_moe() {
  return {.name = "glm4_moe",
          .architecture = "Glm4MoeForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {151552, 4096, 10944, 46, 96, 8, 131072});
                p.model.norm_epsilon = 1e-5, p.rope_theta = 10000;
                p.model.moe.experts = 128, p.model.moe.top_k = 8, p.model.moe.shared_experts = 1;
                p.model.moe.ffn_hidden_size = 1408, p.model.moe.first_dense = 1;
              },
          .keys = joined(decoder_sizes(), rope_keys({.partial = true}), grouped_experts_keys(),
                         sigmoid_router_keys(),
                         JsonKeys{flag("attention_bias", &M::qkv_bias).written([](const Published& p) {
                                    return config::node_of(p.model.qkv_bias);
                                  }),
                                  flag("use_qk_norm", &M::qk_norm).written([](const Published& p) {
                                    return config::node_of(p.model.qk_norm);
                                  })}),
          .names = {.more_layers = true},
          .ia3_targets = {"k_proj", "v_proj"},
          .has = {"moe", "partial_rotary_factor", "qkv_bias", "qk_norm"},
          .lacks = [](const M& m) -> std::optional<std::string> {
            if (auto found = lacks_sigmoid_router(m)) return found;
            return lacks_grouped_experts(m);
          },
          .gguf = {.architecture = "glm4moe", .norm_2 = "post_attention_norm"}};
}

}  // namespace sherd::models

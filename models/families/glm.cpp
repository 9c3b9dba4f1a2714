#include "models/families/family.h"

// GLM-4 (0414): norms on both sides of a block's parts, and half of a head turns, in pairs of neighbours.
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
          .has = {"partial_rotary_factor", "qkv_bias"}};
}

}  // namespace sherd::models

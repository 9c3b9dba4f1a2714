#include "models/families/family.h"

// Mistral, Ministral 3 and Mixtral.
namespace sherd::models {

using M = config::Model;

Family mistral() {
  return {.name = "mistral",
          .architecture = "MistralForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {32000, 4096, 14336, 32, 32, 8, 131072});
                p.window = 4096;
              },
          .keys = joined(decoder_sizes(), no_biases(false, false), rope_keys(), window_keys()),
          .gguf = {.architecture = "llama", .pairs = true, .rope_factors = true}};
}

Family ministral3() {
  return {.name = "ministral3",
          .architecture = "Ministral3ForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {131072, 4096, 14336, 34, 32, 8, 262144});
                p.model.head_dim = 128, p.model.norm_epsilon = 1e-5;
                p.rope.theta = 1e6, p.rope.query_beta = 0.1;
                p.rope.scaling.type = RotaryScaling::yarn, p.rope.scaling.factor = 16;
                p.rope.scaling.attention_factor = 1, p.rope.scaling.original_max_positions = 16384;
              },
          .keys = joined(decoder_sizes(), no_biases(false, false), rope_keys({.query_scaling = true}),
                         window_keys()),
          .has = {"sliding_window", "llama_4_scaling_beta"},
          .lacks = [](const M& m) -> std::optional<std::string> {
            if (m.rope_scaling.original_max_positions == 0)  // which the class always reads
              return "a model.rope_scaling without original_max_position_embeddings";
            return std::nullopt;
          },
          .gguf = {.architecture = "mistral3", .pairs = true, .rope_factors = true}};
}

namespace {

JsonKeys mixtral_keys() {
  JsonKeys keys = joined(decoder_sizes(), no_biases(false, false), rope_keys(), window_keys(),
                         experts_keys("num_local_experts", "num_experts"),
                         JsonKeys{only("router_jitter_noise", config::equals_number(0),
                                       "there it changes what experts read; model.moe.jitter changes what "
                                       "the router reads")});
  write_expert_width(keys);
  return keys;
}

}  // namespace

Family mixtral() {
  return {.name = "mixtral",
          .architecture = "MixtralForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {32000, 4096, 14336, 32, 32, 8, 131072});
                p.model.norm_epsilon = 1e-5;
                p.rope_theta = 1e6;
                p.model.moe.experts = 8, p.model.moe.top_k = 2;
              },
          .keys = mixtral_keys(),
          .names = {.router = "block_sparse_moe.gate",
                    .experts = "block_sparse_moe.experts",
                    .expert_up = {"w1", "w3"},
                    .expert_down = "w2"},
          .ia3_targets = {"k_proj", "v_proj"},
          .has = {"sliding_window", "moe"},
          .lacks = lacks_mixture,
          .gguf = {.architecture = "llama", .pairs = true, .rope_factors = true}};
}

}  // namespace sherd::models

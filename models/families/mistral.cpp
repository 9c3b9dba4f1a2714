#include "models/families/family.h"

// Mistral and Mixtral.
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
          .keys = joined(decoder_sizes(), no_biases(false, false), rope_keys(), window_keys())};
}

namespace {

std::optional<std::string> mistral_lacks(const M& m) {
  if (!m.moe.norm_topk && m.moe.router == RouterScores::softmax) return "model.moe.norm_topk false";
  if (m.moe.every != 1 || m.moe.first_dense != 0) return "blocks without experts";
  return lacks_experts(m);
}

JsonKeys mixtral_keys() {
  JsonKeys keys = joined(decoder_sizes(), no_biases(false, false), rope_keys(), window_keys(),
                         experts_keys("num_local_experts", "num_experts"),
                         JsonKeys{only("router_jitter_noise", config::equals_number(0),
                                       "there it changes what experts read; model.moe.jitter changes what "
                                       "the router reads")});
  for (JsonKey& key : keys)
    if (key.name == "intermediate_size")
      std::move(key).written([](const Published& p) { return config::node_of(p.model.moe.ffn_hidden_size); });
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
          .experts = true,
          .lacks = mistral_lacks};
}

}  // namespace sherd::models

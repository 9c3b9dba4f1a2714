#include "models/families/family.h"

// Phi-3 without LongRoPE (Phi-3-mini-4k, Phi-3-medium-4k), and Phi-4: Llama with fused projections.
namespace sherd::models {

using M = config::Model;

Family phi3() {
  return {
      .name = "phi3",
      .architecture = "Phi3ForCausalLM",
      .class_defaults =
          [](Published& p) {
            set_sizes(p.model, {32064, 3072, 8192, 32, 32, 0, 4096});
            p.model.norm_epsilon = 1e-5;
          },
      .keys = joined(decoder_sizes(),
                     JsonKeys{share("resid_pdrop", &M::dropout), share("embd_pdrop", &M::embedding_dropout),
                              idle("original_max_position_embeddings"),  // LongRoPE's
                              // By default the class has 32000, which a smaller vocabulary does not have.
                              idle("pad_token_id")
                                  .written([](const Published&) { return config::Node(); })
                                  .with(config::or_null)},
                     no_biases(false, false), rope_keys({.partial = true}), window_keys()),
      .names = {.qkv = {"self_attn.qkv_proj"}, .up = {"mlp.gate_up_proj"}},
      .lora_targets = {"qkv_proj"},
      .ia3_targets = {"qkv_proj", "down_proj"},
      .partial_rotary = true};
}

}  // namespace sherd::models

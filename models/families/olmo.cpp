#include "models/families/family.h"

// OLMo 2 and 3: norms behind a block's parts, and one of all query and of all key heads. OLMo 3 has a window
// in three of four layers.
namespace sherd::models {
namespace {

using M = config::Model;

TensorNames olmo_names() {
  return {.norm_1 = "",
          .norm_2 = "",
          .post_norm_1 = "post_attention_layernorm",
          .post_norm_2 = "post_feedforward_layernorm"};
}

/// One graph for both, whose layers with a window have the others' base.
Gguf olmo_gguf() {
  return {.architecture = "olmo2",
          .own_head = true,
          .windows = true,
          .lacks = [](const M& m) -> std::optional<std::string> {
            if (m.sliding_rope && m.sliding_rope->rotary_base != m.rotary_base)
              return "model.sliding_rope with another rope_theta";
            return lacks_other_heads(m);
          }};
}

void olmo_sizes(Published& p) {
  set_sizes(p.model, {50304, 4096, 11008, 32, 32, 0, 2048});
  p.model.norm_epsilon = 1e-5;
}

}  // namespace

Family olmo2() {
  return {.name = "olmo2",
          .architecture = "Olmo2ForCausalLM",
          .class_defaults = olmo_sizes,
          .keys = joined(decoder_sizes(), no_biases(true, false), rope_keys()),
          .names = olmo_names(),
          .has = {},
          .gguf = olmo_gguf()};
}

Family olmo3() {
  return {.name = "olmo3",
          .architecture = "Olmo3ForCausalLM",
          .class_defaults =
              [](Published& p) {
                olmo_sizes(p);
                p.sliding_theta = p.model.rotary_base, p.window = 4096;
              },
          .keys = joined(decoder_sizes(), no_biases(true, false), rope_keys({.sliding = true}),
                         window_keys({.listed = true, .always = true})),
          .names = olmo_names(),
          .has = {"sliding_window", "layer_types", "sliding_rope"},
          .gguf = olmo_gguf()};
}

}  // namespace sherd::models

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

void olmo_sizes(Published& p) {
  set_sizes(p.model, {50304, 4096, 11008, 32, 32, 0, 2048});
  p.model.norm_epsilon = 1e-5;
}

/// The older form of positions, in which models are exported that came from none, has one base for all
/// layers.
std::optional<std::string> olmo3_lacks(const M& m) {
  if (m.sliding_window == 0) return "a model without model.sliding_window";
  if (!m.sliding_rope) return std::nullopt;
  if (m.sliding_rope->rotary_base != m.rotary_base) return "model.sliding_rope.rotary_base of its own";
  if (m.sliding_rope->rope_scaling.type != RotaryScaling::none) return "model.sliding_rope.rope_scaling";
  return std::nullopt;
}

}  // namespace

Family olmo2() {
  return {.name = "olmo2",
          .architecture = "Olmo2ForCausalLM",
          .class_defaults = olmo_sizes,
          .keys = joined(decoder_sizes(), no_biases(true, false), rope_keys()),
          .names = olmo_names(),
          .has = {}};
}

Family olmo3() {
  return {
      .name = "olmo3",
      .architecture = "Olmo3ForCausalLM",
      .class_defaults =
          [](Published& p) {
            using enum config::LayerType;
            olmo_sizes(p);
            p.rope_theta = 5e5, p.window = 4096;
            p.model.layer_types = {sliding_attention, sliding_attention, sliding_attention, full_attention};
          },
      .keys =
          joined(decoder_sizes(), no_biases(true, false), rope_keys({.sliding = true}), window_keys(true)),
      .names = olmo_names(),
      .has = {"sliding_window", "layer_types", "sliding_rope"},
      .lacks = olmo3_lacks};
}

}  // namespace sherd::models

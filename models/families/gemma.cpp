#include <cmath>

#include "models/families/family.h"

// Gemma 2, and Gemma 3's models of text alone (270M and 1B; the others' text part has the same blocks).
namespace sherd::models {
namespace {

using M = config::Model;
using config::LayerType;
using config::Node;
using config::Value;

/// Every so many layers the last has full attention, where layer_types does not say it.
void set_pattern(Published& p, std::int64_t every) {
  p.model.layer_types.assign(static_cast<std::size_t>(every), LayerType::sliding_attention);
  p.model.layer_types.back() = LayerType::full_attention;
}

JsonKey pattern_key(const char* name) {
  return config::custom<Published>(name, "", [](Published& p, const Value& value) {
    set_pattern(p, value.integer(1, config::most_layers));
  });
}

/// Scores are multiplied by this to the power of -1/2: a whole number in these files.
JsonKey score_scalar() {
  const auto read = [](Published& p, const Value& value) {
    p.model.attention_multiplier = 1 / std::sqrt(value.real(0, config::infinity, true));
  };
  const auto write = [](const Published& p) {
    const double m = p.model.attention_multiplier;
    return config::node_of(m == 0 ? p.model.head_dim : std::llround(1 / (m * m)));
  };
  return config::custom<Published>("query_pre_attn_scalar", "", read, write);
}

std::optional<std::string> gemma_lacks(const M& m) {
  const double m2 = m.attention_multiplier * m.attention_multiplier;
  if (m2 > 0 && std::abs(1 / m2 - std::round(1 / m2)) > 1e-9 / m2)
    return "model.attention_multiplier that is no whole number to the power of -1/2";
  return std::nullopt;
}

/// The first thing that llama.cpp's graphs lack. They derive the scale of scores from a head's size, or for
/// the largest model, which has `largest` layers, from the width; and they have no separate table for scores.
std::optional<std::string> lacks_other_scale(const M& m, std::int64_t largest) {
  const std::int64_t scalar = m.num_layers == largest ? m.hidden_size / m.num_heads : m.head_dim;
  const double own = m.attention_multiplier * m.attention_multiplier * static_cast<double>(scalar);
  if (m.attention_multiplier != 0 && std::abs(own - 1) > 1e-6)
    return cat("model.attention_multiplier that is not 1/sqrt(", scalar, ")");
  if (!m.tied()) return "model.tie_embeddings false";
  return std::nullopt;
}

/// c of c·tanh(s/c); null where scores stay as they are.
JsonKey cap(const char* name, double M::*member) {
  const auto read = [](const Value& value) {
    return value.node.is(Node::Kind::null) ? 0 : value.real(0, config::infinity, true);
  };
  const auto write = [member](const Published& p) {
    return p.model.*member > 0 ? config::node_of(p.model.*member) : Node();
  };
  return in_file(config::field_key(name, "", member, read))
      .written(write)
      .with(config::null_too, config::or_null);
}

JsonKeys gemma_keys() {
  using config::FfnActivation;
  return joined(
      decoder_sizes(activation(
          "hidden_activation",
          {{"gelu_pytorch_tanh", FfnActivation::geglu_tanh}, {"gelu_tanh", FfnActivation::geglu_tanh}},
          "\"gelu_pytorch_tanh\" is")),
      no_biases(true, false), window_keys({.listed = true, .always = true}),
      JsonKeys{score_scalar(),
               only("use_bidirectional_attention", config::is_false, "tokens see those before them"),
               idle("cache_implementation")});
}

JsonKeys gemma2_keys() {
  return joined(gemma_keys(), rope_keys(),
                JsonKeys{cap("final_logit_softcapping", &M::final_logit_softcapping),
                         cap("attn_logit_softcapping", &M::attn_logit_softcapping), idle("hidden_act"),
                         idle("sliding_window_size")});
}

JsonKeys gemma3_keys() {
  const auto never_capped = [](const char* name) {
    return only(name, config::never, "scores are not capped in Gemma 3");
  };
  return joined(gemma_keys(), rope_keys({.sliding = true, .local_base = true}),
                JsonKeys{pattern_key("sliding_window_pattern"), pattern_key("_sliding_window_pattern"),
                         never_capped("final_logit_softcapping"), never_capped("attn_logit_softcapping")});
}

/// Norms stand before a block's parts and behind them.
TensorNames gemma_names() {
  return {.norm_2 = "pre_feedforward_layernorm",
          .post_norm_1 = "post_attention_layernorm",
          .post_norm_2 = "post_feedforward_layernorm"};
}

}  // namespace

Family gemma2() {
  return {.name = "gemma2",
          .architecture = "Gemma2ForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {256000, 2304, 9216, 26, 8, 4, 8192});
                p.model.head_dim = 256, p.model.attention_multiplier = 1.0 / 16, p.window = 4096;
              },
          .keys = gemma2_keys(),
          .names = gemma_names(),
          .has = {"sliding_window", "layer_types", "attention_multiplier", "attn_logit_softcapping",
                  "final_logit_softcapping"},
          .lacks = gemma_lacks,
          .gguf = {.architecture = "gemma2", .windows = true, .lacks = [](const M& m) {
                     return lacks_other_scale(m, 46);
                   }}};
}

Family gemma3() {
  return {.name = "gemma3_text",
          .architecture = "Gemma3ForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {262208, 2304, 9216, 26, 8, 4, 131072});
                p.model.head_dim = 256, p.model.attention_multiplier = 1.0 / 16;
                p.sliding_theta = p.model.sliding_rope->rotary_base, p.window = 4096;
              },
          .keys = gemma3_keys(),
          .names = gemma_names(),
          .has = {"sliding_window", "layer_types", "sliding_rope", "attention_multiplier"},
          .lacks = gemma_lacks,
          .gguf = {.architecture = "gemma3", .windows = true, .lacks = [](const M& m) {
                     return lacks_other_scale(m, 62);
                   }}};
}

}  // namespace sherd::models

#include <algorithm>

#include "models/families/family.h"

// ModernBERT (Warner et al. 2024): an encoder of gated blocks without biases, with windows on both sides in
// two of three layers, and rotary positions of two bases.
namespace sherd::models {
namespace {

using config::FfnActivation;
using config::LayerType;
using config::Value;
using M = config::Model;

/// The tokens of a window on both sides, without the one in the middle.
JsonKey local_attention() {
  const auto read = [](Published& p, const Value& value) {
    p.window = value.integer(1, config::most_positions) / 2 + 1;
  };
  const auto write = [](const Published& p) {
    const std::int64_t window = p.model.sliding_window;
    return config::node_of(2 * ((window > 0 ? window : p.model.max_positions + 1) - 1));
  };
  return config::custom<Published>("local_attention", "", read, write);
}

/// Older files say which layers see everything by a number.
JsonKey every_so_many() {
  const auto read = [](Published& p, const Value& value) {
    p.model.layer_types.assign(static_cast<std::size_t>(value.integer(1, config::most_layers)),
                               LayerType::sliding_attention);
    p.model.layer_types.front() = LayerType::full_attention;
  };
  return config::custom<Published>("global_attn_every_n_layers", "", read);
}

JsonKeys modernbert_keys() {
  const auto zero = [](const Value& value) { return value.real(0) == 0; };
  const auto gelu = [](const Value& value) { return value.node.is_text("gelu"); };
  JsonKeys out{whole("max_position_embeddings", &M::max_positions, 1, config::most_positions),
               whole("hidden_size", &M::hidden_size, 1, config::most_hidden),
               whole("intermediate_size", &M::ffn_hidden_size, 1, config::most_ffn_hidden),
               whole("num_hidden_layers", &M::num_layers, 1, config::most_layers),
               whole("num_attention_heads", &M::num_heads, 1, config::most_heads),
               activation("hidden_activation",
                          {{"gelu", FfnActivation::geglu}, {"gelu_pytorch_tanh", FfnActivation::geglu_tanh}},
                          "\"gelu\" and \"gelu_pytorch_tanh\" are"),
               positive("norm_eps", &M::norm_epsilon),
               share("embedding_dropout", &M::embedding_dropout),
               only("attention_dropout", zero, "it would drop outputs too"),
               only("mlp_dropout", zero, "blocks drop what they add, not what lies within"),
               only("norm_bias", config::is_false, "norms have no biases here"),
               only("classifier_bias", config::is_false, "the head's linear layer has no bias here"),
               only("decoder_bias", is_true, "scores of the vocabulary have a bias"),
               only("classifier_activation", gelu, "the head's activation is GELU"),
               config::real("global_rope_theta", &Published::rope_theta, "", 1, config::infinity, true),
               config::real("local_rope_theta", &Published::sliding_theta, "", 1, config::infinity, true),
               local_attention(),
               every_so_many(),
               std::move(window_keys({.listed = true})[1])};
  for (JsonKey& key : out)
    if (key.name.ends_with("rope_theta")) key.write = nullptr;
  for (const char* name :
       {"deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index", "classifier_pooling",
        "initializer_cutoff_factor", "cls_token_id", "reference_compile", "repad_logits_with_grad",
        "position_embedding_type", "layer_norm_eps"})
    out.push_back(idle(name));
  return joined(std::move(out), no_biases(true, true), rope_keys({.sliding = true}));
}

std::optional<std::string> modernbert_lacks(const M& m) {
  if (m.num_kv_heads != m.num_heads) return "model.num_kv_heads";
  if (m.head_dim * m.num_heads != m.hidden_size) return "model.head_dim";
  if (m.dropout > 0) return "model.dropout";
  if (m.attention_dropout > 0) return "model.attention_dropout";
  return std::nullopt;
}

}  // namespace

Family modernbert() {
  return {.name = "modernbert",
          .architecture = "ModernBertForMaskedLM",
          .sequence_classifier = "ModernBertForSequenceClassification",
          .token_classifier = "ModernBertForTokenClassification",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {50368, 768, 1152, 22, 12, 0, 8192});
                p.window = 65, p.sliding_theta = 1e4;
              },
          .keys = modernbert_keys(),
          .names = {.tokens = "embeddings.tok_embeddings",
                    .embedding_norm = "embeddings.norm",
                    .norm = "final_norm",
                    .norm_1 = "attn_norm",
                    .norm_2 = "mlp_norm",
                    .qkv = {"attn.Wqkv"},
                    .projection = "attn.Wo",
                    .up = {"mlp.Wi"},
                    .down = "mlp.Wo",
                    .head = "decoder",
                    .head_dense = "head.dense",
                    .head_norm = "head.norm",
                    .head_bias = "decoder",
                    .classifier = "classifier"},
          .lora_targets = {"Wqkv"},
          .ia3_targets = {"Wqkv", "mlp.Wo"},
          .has = {"sliding_window", "layer_types", "sliding_rope"},
          .lacks = modernbert_lacks,
          .gguf = {.architecture = "modern-bert", .packed_qkv = true, .packed_up = true, .windows = true}};
}

}  // namespace sherd::models

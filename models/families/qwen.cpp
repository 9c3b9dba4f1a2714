#include <numeric>

#include "models/families/family.h"

// Qwen2, Qwen3, Qwen2-MoE and Qwen3-MoE; Qwen3-Next and the text part of Qwen3.5, of whose layers three in
// four have linear attention.
namespace sherd::models {
namespace {

using M = config::Model;
using E = config::Moe;
using A = config::LinearAttention;
using config::LayerType;
using config::Node;
using config::Value;

/// The keys that all three have. `qkv_bias` and `qk_norm`: what the class has.
JsonKeys common(bool qkv_bias, bool qk_norm, bool layer_types) {
  const auto is = [](bool value) { return value ? is_true : config::is_false; };
  return joined(
      decoder_sizes(), qk_norm ? bias_keys(false) : no_biases(false, false), rope_keys(),
      window_keys({.listed = layer_types}),
      JsonKeys{only("use_qk_norm", is(qk_norm), "the family decides"),
               only("qkv_bias", is(qkv_bias), "the family decides"),
               flag("use_sliding_window", &Published::use_sliding_window).written([](const Published& p) {
                 return config::node_of(p.model.sliding_window > 0);
               })});
}

/// Qwen2's models see everything in their first layers, Qwen3-MoE's have the key alone.
JsonKey max_window_layers() {
  return whole("max_window_layers", &Published::first_full_layers, 0, config::most_layers);
}

JsonKeys dense_keys(bool qkv_bias, bool qk_norm) {
  return joined(common(qkv_bias, qk_norm, true), JsonKeys{max_window_layers().written([](const Published& p) {
                  std::int64_t full = 0;
                  while (full < p.model.num_layers && !p.model.slides(full)) ++full;
                  return config::node_of(full);
                })});
}

void dense_defaults(Published& p) {
  set_sizes(p.model, {151936, 4096, 22016, 32, 32, 32, 32768});
  p.use_sliding_window = false, p.window = 4096, p.first_full_layers = 28;
}

/// The first so many layers are dense; a list of others has no key here.
JsonKey mlp_only_layers() {
  const auto read = [](Published& published, const Value& value) {
    value.expect(Node::Kind::array);
    std::int64_t first = 0;
    for (const Node& item : value.node.items)
      if (!item.is(Node::Kind::integer) || item.integer != first++)
        value.error(value.node.brief(), " is not supported: only the first layers can be dense ones");
    published.model.moe.first_dense = first;
  };
  const auto write = [](const Published& p) {
    std::vector<std::int64_t> layers(static_cast<std::size_t>(p.model.moe.first_dense));
    std::iota(layers.begin(), layers.end(), 0);
    return config::list_of(layers);
  };
  return config::custom<Published>("mlp_only_layers", "", read, write);
}

/// The width of the part that all tokens take beside their experts, whole experts here.
JsonKey shared_width() {
  return whole("shared_expert_intermediate_size", &Published::shared_width, 1, config::most_ffn_hidden)
      .written([](const Published& p) {
        return config::node_of(p.model.moe.shared_experts * p.model.moe.ffn_hidden_size);
      });
}

JsonKeys moe_keys(bool first) {
  JsonKeys keys = joined(
      common(first, !first, false), JsonKeys{max_window_layers()},
      experts_keys("num_experts", "num_local_experts"),
      JsonKeys{whole("moe_intermediate_size", &E::ffn_hidden_size, 1, config::most_ffn_hidden),
               whole("decoder_sparse_step", &E::every, 1, config::most_layers),
               flag("norm_topk_prob", &E::norm_topk).written([](const Published& p) {
                 const E& moe = p.model.moe;
                 return config::node_of(moe.norm_topk || moe.router == RouterScores::softmax_of_chosen);
               }),
               first ? shared_width()
                     : only("shared_expert_intermediate_size", config::equals_number(0),
                            "there are no shared experts"),
               mlp_only_layers()});
  // The class has these two and goes by use_sliding_window alone.
  for (JsonKey& key : keys)
    if (key.name == "max_window_layers" || key.name == "layer_types")
      key.read = [read = key.read](Published&, const Value& value) {
        Published unused;
        read(unused, value);
      };
  return keys;
}

/// Every so many layers the last has full attention.
JsonKey full_attention_interval() {
  const auto read = [](Published& published, const Value& value) {
    std::vector<LayerType>& types = published.model.layer_types;
    types.assign(static_cast<std::size_t>(value.integer(1, config::most_layers)),
                 LayerType::linear_attention);
    types.back() = LayerType::full_attention;
  };
  return config::custom<Published>("full_attention_interval", "", read);
}

/// The keys of the classes with linear attention. `moe`: the keys of their experts.
JsonKeys hybrid_keys(JsonKeys moe) {
  return joined(
      decoder_sizes(), no_biases(true, false), rope_keys({.partial = true}),
      JsonKeys{std::move(window_keys({.listed = true, .linear = true})[1]), full_attention_interval(),
               whole("linear_num_key_heads", &A::num_key_heads, 1, config::most_heads),
               whole("linear_num_value_heads", &A::num_value_heads, 1, config::most_heads),
               whole("linear_key_head_dim", &A::key_head_dim, 1, config::most_linear_head),
               whole("linear_value_head_dim", &A::value_head_dim, 1, config::most_linear_head),
               whole("linear_conv_kernel_dim", &A::conv_kernel_dim, 1, 8),
               only("attn_output_gate", is_true, "attention has a gate"),
               only("output_gate_type", equals_text("swish"), "linear attention's gate is one"),
               only("use_sliding_window", config::is_false, "layers have no window"), idle("mamba_ssm_dtype"),
               idle("mtp_num_hidden_layers"), idle("mtp_use_dedicated_embeddings")},
      std::move(moe));
}

JsonKeys hybrid_moe_keys(bool dense_layers) {
  JsonKeys keys = joined(
      experts_keys("num_experts", "num_local_experts"),
      JsonKeys{whole("moe_intermediate_size", &E::ffn_hidden_size, 1, config::most_ffn_hidden),
               shared_width(), flag("norm_topk_prob", &E::norm_topk).written([](const Published& p) {
                 const E& moe = p.model.moe;
                 return config::node_of(moe.norm_topk || moe.router == RouterScores::softmax_of_chosen);
               })});
  if (!dense_layers) {
    keys.push_back(only("mlp_only_layers", config::is_empty, "all layers have experts"));
    return keys;
  }
  keys.push_back(whole("decoder_sparse_step", &E::every, 1, config::most_layers));
  keys.push_back(mlp_only_layers());
  return keys;
}

std::optional<std::string> lacks_shared_experts(const M& m) {
  M without = m;
  without.moe.shared_experts = 0;
  if (m.moe.shared_experts == 0) return "no model.moe.shared_experts";
  if (!m.moe.shared_expert_gate) return "model.moe.shared_expert_gate false";
  return lacks_experts(without);
}

std::optional<std::string> lacks_biases(const M& m) {
  if (m.bias) return "model.bias";
  return std::nullopt;
}

/// The first thing that llama.cpp's graphs with linear attention lack.
std::optional<std::string> lacks_other_hybrids(const M& m) {
  const A& linear = m.linear_attention;
  if (linear.key_head_dim != linear.value_head_dim)
    return "model.linear_attention.value_head_dim that is not key_head_dim";
  if (m.moe.experts > 0) return lacks_other_experts(m, true);
  return std::nullopt;
}

void hybrid_defaults(Published& p, const ClassSizes& sizes) {
  set_sizes(p.model, sizes);
  p.model.linear_attention.num_value_heads = 32, p.rope_theta = 10000;
  p.model.head_dim = 256, p.model.norm_epsilon = 1e-6, p.model.partial_rotary_factor = 0.25;
}

}  // namespace

Family qwen2() {
  return {.name = "qwen2",
          .architecture = "Qwen2ForCausalLM",
          .class_defaults = dense_defaults,
          .keys = dense_keys(true, false),
          .has = {"sliding_window", "layer_types"},
          .gguf = {.architecture = "qwen2", .lacks = lacks_other_heads}};
}

Family qwen3() {
  return {.name = "qwen3",
          .architecture = "Qwen3ForCausalLM",
          .class_defaults = [](Published& p) { dense_defaults(p), p.model.head_dim = 128; },
          .keys = dense_keys(false, true),
          .has = {"sliding_window", "layer_types", "bias"},
          .gguf = {.architecture = "qwen3", .lacks = lacks_biases}};
}

Family qwen3_moe() {
  return {.name = "qwen3_moe",
          .architecture = "Qwen3MoeForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {151936, 2048, 6144, 24, 32, 4, 32768});
                p.use_sliding_window = false, p.window = 4096;
                p.model.moe.experts = 128, p.model.moe.top_k = 8, p.model.moe.ffn_hidden_size = 768;
                p.model.moe.norm_topk = false;
              },
          .keys = moe_keys(false),
          .ia3_targets = {"k_proj", "v_proj"},
          .has = {"sliding_window", "moe", "bias"},
          .lacks = lacks_experts,
          .gguf = {.architecture = "qwen3moe", .lacks = [](const M& m) {
                     const auto found = lacks_biases(m);
                     return found ? found : lacks_other_experts(m, true);
                   }}};
}

Family qwen2_moe() {
  return {.name = "qwen2_moe",
          .architecture = "Qwen2MoeForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {151936, 2048, 5632, 24, 16, 16, 32768});
                p.use_sliding_window = false, p.window = 4096, p.shared_width = 5632;
                p.model.moe.experts = 60, p.model.moe.top_k = 4, p.model.moe.ffn_hidden_size = 1408;
                p.model.moe.norm_topk = false;
              },
          .keys = moe_keys(true),
          .names = {.shared = "mlp.shared_expert"},
          .ia3_targets = {"k_proj", "v_proj"},
          .has = {"moe"},
          .lacks = lacks_shared_experts,
          .gguf = {.architecture = "qwen2moe", .own_head = true, .lacks = [](const M& m) {
                     const auto found = lacks_other_heads(m);
                     return found ? found : lacks_other_experts(m, false);
                   }}};
}

Family qwen3_next() {
  return {
      .name = "qwen3_next",
      .architecture = "Qwen3NextForCausalLM",
      .class_defaults =
          [](Published& p) {
            hybrid_defaults(p, {151936, 2048, 5632, 48, 16, 2, 32768});
            p.shared_width = 512, p.model.moe.experts = 512, p.model.moe.top_k = 10;
            p.model.moe.ffn_hidden_size = 512;
          },
      .keys = hybrid_keys(hybrid_moe_keys(true)),
      .names = {.shared = "mlp.shared_expert",
                .linear = {.qkv = "in_proj_qkvz", .ba = {"in_proj_ba"}, .grouped = true},
                .passed_over = {"mtp."}},
      .ia3_targets = {"k_proj", "v_proj"},
      .has = {"moe", "partial_rotary_factor", "layer_types", "linear_attention"},
      .lacks = lacks_shared_experts,
      .gguf = {.architecture = "qwen3next", .norm_2 = "post_attention_norm", .lacks = lacks_other_hybrids}};
}

Family qwen3_5() {
  return {.name = "qwen3_5_text",
          .architecture = "Qwen3_5ForCausalLM",
          .class_defaults =
              [](Published& p) {
                hybrid_defaults(p, {248320, 4096, 12288, 32, 16, 4, 32768});
              },
          .keys = hybrid_keys({only("mlp_only_layers", config::is_empty, "there are no experts")}),
          .names = {.passed_over = {"mtp."}},
          .has = {"partial_rotary_factor", "layer_types", "linear_attention"},
          .gguf = {.architecture = "qwen35",
                   .tiled_values = true,
                   .norm_2 = "post_attention_norm",
                   .lacks = lacks_other_hybrids}};
}

Family qwen3_5_moe() {
  return {.name = "qwen3_5_moe_text",
          .architecture = "Qwen3_5MoeForCausalLM",
          .class_defaults =
              [](Published& p) {
                hybrid_defaults(p, {248320, 2048, 512, 40, 16, 2, 32768});
                p.shared_width = 512, p.model.moe.experts = 256, p.model.moe.top_k = 8;
                p.model.moe.ffn_hidden_size = 512;
              },
          .keys = hybrid_keys(hybrid_moe_keys(false)),
          .names = {.shared = "mlp.shared_expert", .passed_over = {"mtp."}},
          .ia3_targets = {"k_proj", "v_proj"},
          .has = {"moe", "partial_rotary_factor", "layer_types", "linear_attention"},
          .lacks = [](const M& m) -> std::optional<std::string> {
            if (m.moe.every != 1 || m.moe.first_dense != 0) return "layers without experts";
            return lacks_shared_experts(m);
          },
          .gguf = {.architecture = "qwen35moe",
                   .tiled_values = true,
                   .norm_2 = "post_attention_norm",
                   .lacks = lacks_other_hybrids}};
}

}  // namespace sherd::models

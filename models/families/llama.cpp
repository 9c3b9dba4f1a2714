#include <algorithm>

#include "base/text/excerpt.h"
#include "models/families/family.h"

// Llama, and what its relatives have in common.
namespace sherd::models {

using M = config::Model;
using E = config::Moe;
using config::LayerType;
using config::Node;
using config::Value;

void set_sizes(M& model, const ClassSizes& sizes) {
  model.vocab_size = sizes.vocabulary, model.hidden_size = sizes.hidden, model.ffn_hidden_size = sizes.ffn;
  model.num_layers = sizes.layers, model.num_heads = sizes.heads, model.num_kv_heads = sizes.kv_heads;
  model.max_positions = sizes.positions;
  model.norm_epsilon = model.norm == config::Norm::layernorm ? 1e-5 : 1e-6;
}

JsonKey silu() {
  return activation("hidden_act",
                    {{"silu", config::FfnActivation::swiglu}, {"swish", config::FfnActivation::swiglu}},
                    "\"silu\" is");
}

JsonKeys decoder_sizes(JsonKey activation) {
  // Null is num_attention_heads, whatever the class has where the key is absent.
  const auto kv_heads = [](const Value& value) {
    return value.node.is(Node::Kind::null) ? 0 : value.integer(1, config::most_heads);
  };
  return {whole("max_position_embeddings", &M::max_positions, 1, config::most_positions),
          whole("hidden_size", &M::hidden_size, 1, config::most_hidden),
          whole("intermediate_size", &M::ffn_hidden_size, 1, config::most_ffn_hidden),
          whole("num_hidden_layers", &M::num_layers, 1, config::most_layers),
          whole("num_attention_heads", &M::num_heads, 1, config::most_heads),
          in_file(config::field_key("num_key_value_heads", "", &M::num_kv_heads, kv_heads))
              .with(config::null_too),
          whole("head_dim", &M::head_dim, 1, config::most_hidden),
          std::move(activation),
          positive("rms_norm_eps", &M::norm_epsilon),
          share("attention_dropout", &M::attention_dropout)};
}

JsonKeys no_biases(bool attention_written, bool mlp_written) {
  JsonKeys out{only("attention_bias", config::is_false, "the projections of attention have no biases here"),
               only("mlp_bias", config::is_false, "the feed-forward part has no biases here")};
  const auto none = [](const Published&) { return config::node_of(false); };
  if (attention_written) std::move(out[0]).written(none);
  if (mlp_written) std::move(out[1]).written(none);
  return out;
}

JsonKeys bias_keys(bool of_mlp) {
  JsonKeys out{flag("attention_bias", &M::bias).written([](const Published& p) {
    return config::node_of(p.model.bias);
  })};
  if (of_mlp)
    out.push_back(flag("mlp_bias", &Published::mlp_bias).written([](const Published& p) {
      return config::node_of(p.model.has_mlp_bias());
    }));
  else
    out.push_back(only("mlp_bias", config::is_false, "the feed-forward part has no biases here"));
  return out;
}

JsonKeys window_keys(WindowKeys has) {
  const auto window = [](const Value& value) {
    return value.node.is(Node::Kind::null) ? 0 : value.integer(0, config::most_positions);
  };
  const std::vector<LayerType> known{LayerType::full_attention,
                                     has.linear ? LayerType::linear_attention : LayerType::sliding_attention};
  const auto read_types = [known](Published& published, const Value& value) {
    value.expect(Node::Kind::array);
    for (const Node& item : value.node.items) {
      const std::string& name = Value{item, value.path, value.context}.text();
      const auto type = std::find_if(known.begin(), known.end(),
                                     [&](LayerType each) { return config::name_of(each) == name; });
      if (type == known.end()) value.error("\"", excerpt(name), "\" is not supported");
      published.layer_types.push_back(*type);
    }
  };
  const auto written_types = [](const Published& p) {
    std::vector<std::string> names;
    for (std::int64_t i = 0; i < p.model.num_layers; ++i)
      names.emplace_back(config::name_of(p.model.layer_type(i)));
    return config::list_of(names);
  };
  const auto written = [has](const Published& p) {
    if (p.model.sliding_window > 0) return config::node_of(p.model.sliding_window);
    return has.always ? config::node_of(p.model.max_positions) : Node();
  };
  return {config::field_key("sliding_window", "", &Published::window, window)
              .written(written)
              .with(config::null_too, config::or_null),
          has.listed ? config::custom<Published>("layer_types", "", read_types, written_types)
                     : config::custom<Published>("layer_types", "", read_types)};
}

JsonKeys experts_keys(std::string count, std::string other_count) {
  const auto pooled = [](const Published& p) {
    return p.model.moe.aux_loss_type == BalanceLoss::pooled && p.model.moe.aux_loss > 0;
  };
  const auto asks = [=](const Published& p) { return config::node_of(pooled(p)); };
  const auto loss = [=](const Published& p) {
    return pooled(p) ? config::node_of(p.model.moe.aux_loss) : Node();
  };
  return {whole("num_experts_per_tok", &E::top_k, 1, config::most_experts),
          flag("output_router_logits", &Published::router_losses).written(asks),
          config::real("router_aux_loss_coef", &Published::router_loss, "", 0).written(loss),
          whole(std::move(count), &E::experts, 1, config::most_experts).alias(std::move(other_count))};
}

std::optional<std::string> lacks_experts(const M& m) {
  const E& moe = m.moe;
  if (moe.router == RouterScores::sigmoid) return "model.moe.router \"sigmoid\"";
  if (moe.shared_experts > 0) return "model.moe.shared_experts";
  if (moe.use_residual) return "model.moe.use_residual";
  if (moe.routed_scaling_factor != 1) return "model.moe.routed_scaling_factor";
  if (moe.groups != 1) return "model.moe.groups";
  if (moe.capacity_factor > 0) return "model.moe.capacity_factor";
  if (moe.correction_bias) return "model.moe.correction_bias";
  if (moe.first_dense % moe.every != 0) return "model.moe.first_dense that model.moe.every does not divide";
  return std::nullopt;
}

std::optional<std::string> lacks_mixture(const M& m) {
  if (!m.moe.norm_topk && m.moe.router == RouterScores::softmax) return "model.moe.norm_topk false";
  if (m.moe.every != 1 || m.moe.first_dense != 0) return "blocks without experts";
  return lacks_experts(m);
}

JsonKeys grouped_experts_keys(bool norm_topk) {
  const auto groups = [](const char* name, std::int64_t E::*member) {
    const auto read = [](const Value& value) {
      return value.node.is(Node::Kind::null) ? 1 : value.integer(1, config::most_experts);
    };
    return in_file(config::field_key(name, "", member, read)).with(config::null_too);
  };
  return {
      whole("n_routed_experts", &E::experts, 1, config::most_experts).alias("num_local_experts"),
      whole("num_experts_per_tok", &E::top_k, 1, config::most_experts),
      whole("n_shared_experts", &E::shared_experts, 1, config::most_experts),
      whole("moe_intermediate_size", &E::ffn_hidden_size, 1, config::most_ffn_hidden),
      whole("first_k_dense_replace", &E::first_dense, 0, config::most_layers),
      positive("routed_scaling_factor", &E::routed_scaling_factor),
      norm_topk ? flag("norm_topk_prob", &E::norm_topk)
                : only("norm_topk_prob", config::is_false, "experts weigh as their scores say")
                      .written([](const Published&) { return config::node_of(false); }),
      groups("n_group", &E::groups),
      groups("topk_group", &E::top_groups),
      only("moe_layer_freq", config::equals_number(1), "all layers behind the first dense ones have experts"),
      only("output_router_logits", config::is_false, "model.moe.aux_loss sets the balance loss"),
      idle("aux_loss_alpha"),
      idle("router_aux_loss_coef"),
      idle("seq_aux"),
      idle("ep_size")};
}

JsonKeys sigmoid_router_keys() {
  return {only("scoring_func", equals_text("sigmoid"), "scores are sigmoids"),
          only("topk_method", equals_text("noaux_tc"), "a bias corrects the choice"),
          // Such layers are passed over; the class has one where nothing is said.
          idle("num_nextn_predict_layers").written([](const Published&) { return config::node_of(0); }),
          idle("num_mtp_layers")};
}

std::optional<std::string> lacks_grouped_experts(const M& m) {
  const E& moe = m.moe;
  if (moe.shared_experts == 0) return "no model.moe.shared_experts";
  if (moe.shared_expert_gate) return "model.moe.shared_expert_gate";
  if (moe.use_residual) return "model.moe.use_residual";
  if (moe.every != 1) return "model.moe.every";
  if (moe.capacity_factor > 0) return "model.moe.capacity_factor";
  return std::nullopt;
}

std::optional<std::string> lacks_sigmoid_router(const M& m) {
  if (m.moe.router != RouterScores::sigmoid) return "model.moe.router that is not \"sigmoid\"";
  if (!m.moe.correction_bias) return "a model without model.moe.correction_bias";
  return std::nullopt;
}

void write_expert_width(JsonKeys& keys) {
  for (JsonKey& key : keys)
    if (key.name == "intermediate_size")
      std::move(key).written([](const Published& p) { return config::node_of(p.model.moe.ffn_hidden_size); });
}

Family llama() {
  const auto is_silu = [](const Value& value) {
    return value.node.is_text("silu") || value.node.is_text("swiglu");
  };
  JsonKey layer_types = std::move(window_keys()[1]);
  return {.name = "llama",
          .architecture = "LlamaForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {32000, 4096, 11008, 32, 32, 0, 2048});
              },
          .keys = joined(decoder_sizes(), bias_keys(true), rope_keys(),
                         JsonKeys{only("activation", is_silu, "the activation is SiLU"),
                                  only("sliding_window", config::never,
                                       "the family has none; where transformers passes it over, take it out "
                                       "of the file"),
                                  std::move(layer_types)}),
          .has = {"bias", "mlp_bias"},
          .gguf = {.architecture = "llama", .pairs = true, .rope_factors = true}};
}

}  // namespace sherd::models

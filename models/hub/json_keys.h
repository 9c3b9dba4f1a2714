#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/model.h"
#include "config/rows.h"

// Keys of a config.json, each described once, by a row as a configuration's keys are (config/reader.h): how
// it is read into a model, and what of a model it is written as. Families (models/families) are lists of
// them.
namespace sherd::models {

/// Rotary positions as one section of a config.json has them.
struct PublishedRope {
  double theta = 0;                  ///< 0: absent
  double share = 0;                  ///< partial_rotary_factor; 0: absent
  double mscale_all_dim = 0;         ///< of yarn; 0: absent
  std::optional<double> query_beta;  ///< llama_4_scaling_beta
  config::RopeScaling scaling;
  bool original_missing = false;  ///< it does not say which positions it scales
};

/// A model as it is read from a config.json. The fields beside the model are keys of which several of the
/// model's fields are made; they begin as in families that do not have the key.
struct Published {
  config::Model model;
  std::string dtype, torch_dtype;
  double rope_theta = 0, partial_rotary_factor = 0;  ///< beside the sections; 0: absent
  PublishedRope rope;                                ///< in rope_parameters, which go before
  std::optional<PublishedRope> older_rope;           ///< in rope_scaling, which goes before both
  std::int64_t first_positions = 0;      ///< original_max_position_embeddings beside longrope's; 0: absent
  double sliding_theta = 0;              ///< of the layers with a window; 0: as the others'
  std::optional<PublishedRope> sliding;  ///< nothing: no section is for them alone
  std::int64_t no_rope_layers = 0;       ///< that a list names
  std::optional<std::int64_t> listed_no_rope_interval;  ///< as a list says, which goes before the key
  bool mlp_bias = false;                                ///< beside attention_bias
  std::int64_t shared_width = 0;  ///< of the experts that all tokens take, together; 0: absent
  bool greedy_experts = false;    ///< DeepSeek-V2's topk_method, which looks at no groups
  std::int64_t encoder_layers = 0, decoder_layers = 0;  ///< 0 of a decoder: as many as of the encoder
  std::optional<bool> scales_scores;  ///< T5's are divided by the root of the width; nothing: absent
  std::string dense_act;              ///< T5's activation said again; empty: absent
  std::optional<bool> gated_act;      ///< and whether it has a gate
  bool use_sliding_window = true;
  std::int64_t window = 0;
  std::int64_t first_full_layers = 0;          ///< layers at the start that see everything
  std::vector<config::LayerType> layer_types;  ///< empty: absent
  bool router_losses = false;
  double router_loss = 0.001;
};

using JsonKey = config::Key<Published>;
using JsonKeys = std::vector<JsonKey>;

/// All lists, one behind the other.
template <std::same_as<JsonKeys>... More>
JsonKeys joined(JsonKeys first, More... more) {
  (config::append(first, std::move(more)), ...);
  return first;
}

/// A key of the model, or of its experts, as one of the file.
inline JsonKey in_file(const config::Key<config::Model>& key) {
  return config::inside(&Published::model, key);
}
inline JsonKey in_file(const config::Key<config::Mla>& key) {
  return config::lifted<Published>(
      key, [](auto& published) -> auto& { return published.model.mla; });
}
inline JsonKey in_file(const config::Key<config::Moe>& key) {
  return config::lifted<Published>(
      key, [](auto& published) -> auto& { return published.model.moe; });
}
inline JsonKey in_file(const config::Key<config::LinearAttention>& key) {
  return config::lifted<Published>(
      key, [](auto& published) -> auto& { return published.model.linear_attention; });
}
/// A key beside these, which is not written unless written() gives its value.
inline JsonKey in_file(JsonKey key) {
  key.write = nullptr;
  return key;
}

template <class S>
JsonKey whole(std::string name, std::int64_t S::*member, std::int64_t least, std::int64_t most) {
  return in_file(config::integer(std::move(name), member, "", least, most));
}
template <class S>
JsonKey positive(std::string name, double S::*member) {
  return in_file(config::real(std::move(name), member, "", 0, config::infinity, true));
}
template <class S>
JsonKey share(std::string name, double S::*member) {
  return in_file(config::real(std::move(name), member, "", 0, 0.99));
}
template <class S>
JsonKey flag(std::string name, bool S::*member) {
  return in_file(config::boolean(std::move(name), member));
}
/// A key that may have one value alone, the one for which the models are the same; `reason` says why.
JsonKey only(std::string name, std::function<bool(const config::Value&)> same, std::string reason);
/// A key on which no number of the model depends. Where it is written, it does not replace the value in the
/// file that the model came from.
JsonKey idle(std::string name);
/// The names of activations that the class knows; `known` says them in an error.
JsonKey activation(std::string name, std::vector<std::pair<std::string, config::FfnActivation>> names,
                   std::string known);

bool is_true(const config::Value& value);
std::function<bool(const config::Value&)> equals_text(std::string text);

/// Keys that all families have, most of which say nothing about the model's numbers.
JsonKeys common_keys();
/// The keys of rotary positions in both their forms: rope_theta and rope_scaling, and rope_parameters.
struct RopeKeys {
  bool partial = false;        ///< the class has partial_rotary_factor
  bool sliding = false;        ///< positions of their own for layers with a window
  bool local_base = false;     ///< whose base the older form has, as rope_local_base_freq
  bool query_scaling = false;  ///< llama_4_scaling_beta, in rope_parameters alone
  bool mscale = false;         ///< mscale_all_dim, which multiplies scores too
};
JsonKeys rope_keys(RopeKeys has = {});

}  // namespace sherd::models

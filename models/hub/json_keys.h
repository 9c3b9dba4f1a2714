#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/model.h"
#include "config/reader.h"

// Keys of a config.json, each described once: how it is read into a model, and what of a model it is written
// as. Families (models/families) are lists of them.
namespace sherd::models {

/// A model as it is read from a config.json. The fields beside the model are keys of which several of the
/// model's fields are made; they begin as in families that do not have the key.
struct Published {
  config::Model model;
  std::string dtype, torch_dtype;
  double rope_theta = 0;          ///< 0: absent
  double inner_theta = 0;         ///< in rope_parameters, which goes before; 0: absent
  bool original_missing = false;  ///< rope_scaling does not say which positions it scales
  bool use_sliding_window = true;
  std::int64_t window = 0;
  std::int64_t first_full_layers = 0;    ///< layers at the start that see everything
  std::vector<std::string> layer_types;  ///< empty: absent
  bool router_losses = false, router_loss_given = false;
  double router_loss = 0.001;
};

struct JsonKey {
  std::string name;
  std::string other_name = {};  ///< that means the same; empty: none
  std::function<void(Published&, const config::Value&)> read;
  /// Null, or without a value: the key is not written.
  std::function<std::optional<config::Node>(const config::Model&)> write = {};
  bool reads_null = false;      ///< else null means absent
  bool stays_original = false;  ///< not written over what a file has that the model came from

  JsonKey alias(std::string other) && { return other_name = std::move(other), std::move(*this); }
  JsonKey unless_original() && { return stays_original = true, std::move(*this); }
  JsonKey null_too() && { return reads_null = true, std::move(*this); }
  JsonKey written(std::function<std::optional<config::Node>(const config::Model&)> as) && {
    return write = std::move(as), std::move(*this);
  }
  JsonKey written_as(config::Node value) && {
    return std::move(*this).written([value = std::move(value)](const config::Model&) { return value; });
  }
};
using JsonKeys = std::vector<JsonKey>;

/// All lists, one behind the other.
template <std::same_as<JsonKeys>... More>
JsonKeys joined(JsonKeys first, More... more) {
  const auto append = [&](JsonKeys& list) {
    for (JsonKey& key : list) first.push_back(std::move(key));
  };
  (append(more), ...);
  return first;
}

/// The field of what is read that `member` names: of the model, its experts, or the keys beside them.
template <class S, class T>
T& field(Published& published, T S::*member) {
  if constexpr (std::same_as<S, config::Model>)
    return published.model.*member;
  else if constexpr (std::same_as<S, config::Moe>)
    return published.model.moe.*member;
  else
    return published.*member;
}

/// A key that is read by `take` into `member`, and written as what that holds, if it is a field of the model.
template <class S, class T, class Take>
JsonKey member_key(std::string name, T S::*member, Take take) {
  JsonKey key{.name = std::move(name), .read = [=](Published& published, const config::Value& value) {
                field(published, member) = take(value);
              }};
  if constexpr (std::same_as<S, config::Model>)
    key.write = [=](const config::Model& model) { return std::optional(config::node_of(model.*member)); };
  if constexpr (std::same_as<S, config::Moe>)
    key.write = [=](const config::Model& model) { return std::optional(config::node_of(model.moe.*member)); };
  return key;
}

template <class S>
JsonKey whole(std::string name, std::int64_t S::*member, std::int64_t least, std::int64_t most) {
  return member_key(std::move(name), member,
                    [=](const config::Value& value) { return value.integer(least, most); });
}
template <class S>
JsonKey positive(std::string name, double S::*member) {
  return member_key(std::move(name), member,
                    [](const config::Value& value) { return value.real(0, config::infinity, true); });
}
template <class S>
JsonKey share(std::string name, double S::*member) {
  return member_key(std::move(name), member, [](const config::Value& value) { return value.real(0, 0.99); });
}
template <class S>
JsonKey flag(std::string name, bool S::*member) {
  return member_key(std::move(name), member, [](const config::Value& value) { return value.boolean(); });
}
/// A key that may have one value alone, the one for which the models are the same; `reason` says why.
JsonKey only(std::string name, std::function<bool(const config::Value&)> same, std::string reason);
/// A key on which no number of the model depends.
JsonKey idle(std::string name);
/// The names of activations that the class knows; `known` says them in an error.
JsonKey activation(std::string name, std::vector<std::pair<std::string, config::FfnActivation>> names,
                   std::string known);

bool is_true(const config::Value& value);

/// Keys that all families have, most of which say nothing about the model's numbers.
JsonKeys common_keys();
/// The keys of rotary positions in both their forms: rope_theta and rope_scaling, and rope_parameters.
JsonKeys rope_keys();

}  // namespace sherd::models

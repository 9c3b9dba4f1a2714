#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "config/published.h"
#include "models/hub/adapter_config.h"

// adapter_config.json of AdapterHub.
namespace sherd::models {
namespace {

using config::Adapter;
using config::AdapterType;
using config::Node;
using config::Value;
using Json = nlohmann::ordered_json;

/// Keys on which no number of the adapter depends, some of them because of what others say.
constexpr std::array idle_keys{"architecture",
                               "init_weights",
                               "init_weights_seed",
                               "adapter_residual_before_ln",
                               "inv_adapter_reduction_factor",
                               "phm_dim",
                               "factorized_phm_W",
                               "shared_W_phm",
                               "shared_phm_rule",
                               "factorized_phm_rule",
                               "phm_c_init",
                               "phm_init_range",
                               "learn_phm",
                               "hypercomplex_nonlinearity",
                               "phm_rank",
                               "phm_bias"};

}  // namespace

bool is_adapter_hub(std::string_view text, const std::string& name) {
  const Node tree = config::parse_tree(text, name);
  return tree.is(Node::Kind::object) && tree.find("config") && !tree.find("peft_type");
}

Adapter from_adapter_hub(std::string_view text, const std::string& name) {
  const Node tree = config::parse_tree(text, name);
  config::Context context;
  const Value file{tree, "", context};
  Adapter adapter;
  adapter.type = AdapterType::bottleneck;
  // Older versions meant another function by "gelu".
  if (!tree.find("version"))
    fail(ErrorKind::config, name,
         ": has no \"version\": it is older than AdapterHub's `adapters` 1.0; load and save it "
         "with that, with use_safetensors=True");
  const auto called = tree.find("name");
  if (called && called->is(Node::Kind::string)) adapter.bottleneck.name = called->text;
  const Value section{*tree.find("config"), "config", context};
  section.expect(Node::Kind::object);
  if (const Node* kind = section.node.find("architecture"); kind && !kind->is(Node::Kind::null))
    fail(ErrorKind::config, name, ": config.architecture is ", kind->brief(),
         ": of AdapterHub's adapters Sherd has the bottleneck ones");
  Node kept = section.node;
  std::erase_if(kept.members, [&](const auto& member) {
    if (config::has_bottleneck_key(member.first)) return false;
    const bool idle = std::find(idle_keys.begin(), idle_keys.end(), member.first) != idle_keys.end();
    if (!idle && !config::is_off(member.second))
      context.attempt([&] {
        Value{member.second, "config." + member.first, context}.error(
            member.second.brief(), " would change what the adapter computes, and Sherd does not have it");
      });
    return true;
  });
  // transformers calls one function by two names; without the norm's sum there is nothing to count twice.
  const Node* sum = kept.find("original_ln_before");
  std::erase_if(kept.members, [&](const auto& member) {
    return member.first == "residual_before_ln" && sum && sum->is(Node::Kind::boolean) && !sum->boolean;
  });
  for (auto& [key, value] : kept.members)
    if (key == "non_linearity" && value.is_text("silu")) value.text = "swish";
  const Value whole{kept, "config", context};
  context.attempt([&] {
    config::read_bottleneck(adapter.bottleneck, whole,
                            {"mh_adapter", "output_adapter", "reduction_factor", "non_linearity"});
  });
  context.raise();
  return adapter;
}

std::string to_adapter_hub(const Adapter& adapter, std::int64_t hidden, const std::string& model_type,
                           const std::string& base) {
  const config::BottleneckKeys& keys = adapter.bottleneck;
  double factor = keys.reduction_factor;
  if (keys.size > 0) {
    factor = static_cast<double>(hidden) / static_cast<double>(keys.size);
    while (config::BottleneckKeys{.reduction_factor = factor}.width(hidden) < keys.size)
      factor = std::nextafter(factor, 0.0);
  }
  const Json config{{"mh_adapter", keys.attention},
                    {"output_adapter", keys.mlp},
                    {"reduction_factor", factor},
                    {"non_linearity", config::name_of(keys.non_linearity)},
                    {"original_ln_before", keys.of_sum},
                    {"original_ln_after", true},
                    {"residual_before_ln", true},
                    {"adapter_residual_before_ln", false},
                    {"ln_before", false},
                    {"ln_after", false},
                    {"scaling", keys.scale},
                    {"is_parallel", false},
                    {"use_gating", false},
                    {"init_weights", "bert"},
                    {"dropout", 0.0}};
  const Json out{{"config", config},           {"hidden_size", hidden},
                 {"model_class", nullptr},     {"model_name", base.empty() ? Json(nullptr) : Json(base)},
                 {"model_type", model_type},   {"name", keys.name},
                 {"version", "adapters.1.3.0"}};
  return out.dump(2) + "\n";
}

}  // namespace sherd::models

// Keys of training.adapter that bottleneck adapters have, and AdapterHub's adapter_config.json.
#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/excerpt.h"
#include "config/foreign_keys.h"
#include "config/tables.h"

namespace sherd::config {
namespace {

using Json = nlohmann::ordered_json;
using B = BottleneckKeys;

/// AdapterHub's names, in the order of NonLinearity.
const std::vector<std::string> non_linearities{"swish", "relu", "gelu", "gelu_new", "tanh"};
const Synonyms same_non_linearities{{"silu", "swish"}};

}  // namespace

std::vector<Key<BottleneckKeys>> bottleneck_keys() {
  std::vector<Key<B>> keys = {
      boolean("mh_adapter", &B::attention).means("`bottleneck` adapters behind attention"),
      boolean("output_adapter", &B::mlp).means("`bottleneck` adapters behind the feed-forward part"),
      choice("non_linearity", &B::non_linearity, non_linearities, "\"relu\"", same_non_linearities)
          .means("within; `gelu_new` is the tanh approximation of `gelu`", Concerns::training),
      real("scaling", &B::scale, "4")
          .means("what a `bottleneck` gives is multiplied by it", Concerns::training),
      boolean("original_ln_before", &B::of_sum)
          .means("a `bottleneck` reads the stream that its part of the block was added to, not what the part "
                 "gave",
                 Concerns::training),
      text("name", &B::name, "\"task\"").means("what AdapterHub's files call the adapter"),
      integer("bottleneck_size", &B::size, "64", 1, most_hidden)
          .unset(0)
          .means("features in a `bottleneck`", by("`model.hidden_size` / `reduction_factor`")),
      real("reduction_factor", &B::reduction_factor, "8", 0, infinity, true)
          .means("the model's width divided by it is that of a `bottleneck`'s network")};
  keys.back().left_out = [](const B& keys) { return keys.size > 0; };
  append(keys, foreign_keys<B>("training.adapter", "bottleneck"));
  return keys;
}

void finish_bottleneck(const B& keys, const Given& given, const Value& section) {
  if (!keys.attention && !keys.mlp)
    section.error("has neither \"mh_adapter\" nor \"output_adapter\": one of them must be true");
  if (given.contains("bottleneck_size") && given.contains("reduction_factor"))
    section.error("gives both \"bottleneck_size\" and \"reduction_factor\": take one of them away");
  const bool plain = std::none_of(keys.name.begin(), keys.name.end(),
                                  [](unsigned char c) { return c == '.' || std::iscntrl(c) != 0; });
  if (keys.name.empty() || !plain)
    section.error("the adapter's \"name\" is a part of tensors' names, and has no '.', not ",
                  excerpt(keys.name));
}

namespace {

/// hidden // factor as Python has it: of the exact quotient.
std::int64_t reduced(std::int64_t hidden, double factor) {
  const auto all = static_cast<double>(hidden);
  return std::max<std::int64_t>(1, std::llround((all - std::fmod(all, factor)) / factor));
}

}  // namespace

std::int64_t BottleneckKeys::width(std::int64_t hidden) const {
  return size > 0 ? size : reduced(hidden, reduction_factor);
}

namespace {

/// What no number of the adapter depends on, or what the values of others make idle.
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
  const Node tree = parse_tree(text, name);
  return tree.is(Node::Kind::object) && tree.find("config") && !tree.find("peft_type");
}

Adapter from_adapter_hub(std::string_view text, const std::string& name) {
  const Node tree = parse_tree(text, name);
  Context context;
  const Value file{tree, "", context};
  Adapter adapter;
  adapter.type = AdapterType::bottleneck;
  // Those before it meant another function by "gelu".
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
  Table<B> table;
  table.keys = bottleneck_keys();
  Node kept = section.node;
  std::erase_if(kept.members, [&](const auto& member) {
    const bool known = std::any_of(table.keys.begin(), table.keys.end(),
                                   [&](const Key<B>& key) { return key.name == member.first; });
    if (known) return false;
    const bool idle = std::find(idle_keys.begin(), idle_keys.end(), member.first) != idle_keys.end();
    if (!idle && !is_off(member.second))
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
    const Given given = read_section(table, adapter.bottleneck, whole);
    for (const char* key : {"mh_adapter", "output_adapter", "reduction_factor", "non_linearity"})
      if (!given.contains(key)) whole.error("needs \"", key, "\"");
    finish_bottleneck(adapter.bottleneck, given, whole);
  });
  context.raise();
  return adapter;
}

std::string to_adapter_hub(const Adapter& adapter, std::int64_t hidden, const std::string& model_type,
                           const std::string& base) {
  const B& keys = adapter.bottleneck;
  double factor = keys.reduction_factor;
  if (keys.size > 0) {
    factor = static_cast<double>(hidden) / static_cast<double>(keys.size);
    while (reduced(hidden, factor) < keys.size) factor = std::nextafter(factor, 0.0);
  }
  const Json config{{"mh_adapter", keys.attention},
                    {"output_adapter", keys.mlp},
                    {"reduction_factor", factor},
                    {"non_linearity", non_linearities[static_cast<std::size_t>(keys.non_linearity)]},
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

}  // namespace sherd::config

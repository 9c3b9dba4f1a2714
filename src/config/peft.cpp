#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "config/adapter.h"
#include "config/tables.h"

// adapter_config.json of PEFT.
namespace sherd::config {
namespace {

using Json = nlohmann::ordered_json;

/// What no number of the adapter depends on.
constexpr std::array idle_keys{"auto_mapping",      "base_model_name_or_path",
                               "inference_mode",    "revision",
                               "task_type",         "peft_version",
                               "fan_in_fan_out",    "megatron_core",
                               "init_lora_weights", "init_ia3_weights",
                               "runtime_config",    "base_model_class",
                               "parent_library",    "ensure_weight_tying",
                               "qalora_group_size"};

/// Says that a feature is off, as all of PEFT's do that are.
bool is_off(const Node& node) {
  using Kind = Node::Kind;
  return node.is(Kind::null) || (node.is(Kind::boolean) && !node.boolean) ||
         (node.is(Kind::array) && node.items.empty()) || (node.is(Kind::object) && node.members.empty()) ||
         (node.is(Kind::string) && (node.text.empty() || node.text == "none")) ||
         (node.is(Kind::integer) && node.integer == 0);
}

std::vector<std::string> names_in(const Value& value) {
  if (value.node.is(Node::Kind::string)) {
    if (value.text() != "all-linear")
      value.error("\"", value.text(),
                  "\" is a pattern, and Sherd reads lists of names: write the modules out");
    return {value.text()};
  }
  value.expect(Node::Kind::array);
  std::vector<std::string> out;
  for (const Node& item : value.node.items) out.push_back(Value{item, value.path, value.context}.text());
  std::sort(out.begin(), out.end());  // PEFT writes a set, in any order
  return out;
}

void read_peft_key(Adapter& adapter, const std::string& name, const Value& value) {
  const bool lora = adapter.type == AdapterType::lora;
  if (name == "peft_type") return;
  if (name == "target_modules")
    adapter.targets = names_in(value);
  else if (name == "feedforward_modules" && !lora)
    return;  // checked against the tensors' shapes
  else if (name == "r" && lora)
    adapter.rank = value.integer(1, most_adapter_rank);
  else if (name == "lora_alpha" && lora)
    adapter.alpha = value.real(0, infinity, true);
  else if (name == "lora_dropout" && lora)
    adapter.dropout = value.real(0, 0.999);
  else if (name == "use_rslora" && lora)
    adapter.rslora = value.boolean();
  else if (std::find(idle_keys.begin(), idle_keys.end(), name) == idle_keys.end() && !is_off(value.node))
    value.error(value.node.brief(), " would change what the adapter computes, and Sherd does not have it");
}

}  // namespace

Adapter from_peft(std::string_view text, const std::string& name) {
  const Node tree = parse_tree(text, name);
  Context context;
  const Value file{tree, "", context};
  file.expect(Node::Kind::object);
  const Node* type = tree.find("peft_type");
  Adapter adapter;
  if (type && type->is_text("LORA")) adapter.type = AdapterType::lora;
  if (type && type->is_text("IA3")) adapter.type = AdapterType::ia3;
  if (adapter.type == AdapterType::none)
    fail(ErrorKind::config, name, ": peft_type is ", type ? type->brief() : "missing",
         ": Sherd has LORA and IA3");
  for (const auto& [key, node] : tree.members)
    context.attempt([&] { read_peft_key(adapter, key, {node, key, context}); });
  context.raise();
  return adapter;
}

std::string to_peft(const Adapter& adapter, const std::vector<std::string>& targets,
                    const std::vector<std::string>& feedforward, bool transposed, const std::string& base) {
  const bool lora = adapter.type == AdapterType::lora;
  Json out{{"peft_type", lora ? "LORA" : "IA3"},
           {"task_type", "CAUSAL_LM"},
           {"base_model_name_or_path", base.empty() ? Json(nullptr) : Json(base)},
           {"inference_mode", true},
           {"target_modules", targets},
           {"modules_to_save", nullptr},
           {"fan_in_fan_out", transposed}};
  if (lora)
    out.update({{"r", adapter.rank},
                {"lora_alpha", adapter.alpha},
                {"lora_dropout", adapter.dropout},
                {"use_rslora", adapter.rslora},
                {"use_dora", false},
                {"bias", "none"},
                {"init_lora_weights", true}});
  else
    out.update({{"feedforward_modules", feedforward}, {"init_ia3_weights", true}});
  return out.dump(2) + "\n";
}

}  // namespace sherd::config

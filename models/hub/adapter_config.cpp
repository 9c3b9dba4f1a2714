#include "models/hub/adapter_config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "config/published.h"

// adapter_config.json of PEFT, and of AdapterHub.
namespace sherd::models {
namespace {

using config::Adapter;
using config::AdapterType;
using config::Node;
using config::Value;
using Json = nlohmann::ordered_json;

// Keys on which no number of the adapter depends; of AdapterHub's, some because of what others say.
constexpr const char* idle_of_peft =
    "auto_mapping base_model_name_or_path inference_mode revision task_type peft_version "
    "fan_in_fan_out megatron_core init_ia3_weights runtime_config base_model_class parent_library "
    "ensure_weight_tying qalora_group_size token_dim num_attention_heads num_layers "
    "prompt_tuning_init tokenizer_kwargs prompt_tuning_init_text encoder_dropout "
    "tokenizer_name_or_path encoder_num_layers encoder_hidden_size encoder_reparameterization_type";
constexpr const char* idle_of_hub =
    "architecture init_weights init_weights_seed adapter_residual_before_ln "
    "inv_adapter_reduction_factor phm_dim factorized_phm_W shared_W_phm shared_phm_rule "
    "factorized_phm_rule phm_c_init phm_init_range learn_phm hypercomplex_nonlinearity phm_rank "
    "phm_bias";

bool is_among(const std::string& words, const std::string& name) {
  return name.find(' ') == std::string::npos &&
         cat(" ", words, " ").find(cat(" ", name, " ")) != std::string::npos;
}

[[noreturn]] void refuse(const Value& value) {
  value.error(value.node.brief(), " would change what the adapter computes, and Sherd does not have it");
}

/// A name or path of the model; null: none.
Json base_name(const std::string& base) {
  return base.empty() ? Json(nullptr) : Json(base);
}

/// Names of modules, or one regular expression of theirs, which PEFT tells by being no list.
std::vector<std::string> names_in(const Value& value) {
  if (value.node.is(Node::Kind::null)) return {};
  if (value.node.is(Node::Kind::string)) {
    if (value.text() == "all-linear" || is_pattern(value.text())) return {value.text()};
    value.error("\"", value.text(),
                "\" is a regular expression to PEFT, and would have to be all of a module's name: "
                "write a list of names");
  }
  value.expect(Node::Kind::array);
  std::vector<std::string> out;
  for (const Node& item : value.node.items) out.push_back(Value{item, value.path, value.context}.text());
  std::sort(out.begin(), out.end());  // PEFT writes a set, in any order
  return out;
}

template <class N>
Json object_of(const std::vector<std::pair<std::string, N>>& patterns) {
  Json out = Json::object();
  for (const auto& [pattern, number] : patterns) out[pattern] = number;
  return out;
}

/// Some ways to begin change the base, too, which then is not what its file holds. (PEFT 0.21,
/// tuners/lora/layer.py: those named here leave it as it is.)
void read_init(Adapter& adapter, const Value& value) {
  if (value.node.is(Node::Kind::boolean) || value.node.is(Node::Kind::null)) return;
  const std::string init = value.text();
  for (const char* plain : {"orthogonal", "eva", "mica"})
    if (init == plain) return;
  if (init == "gaussian" || init == "pissa" || init == "olora")
    return config::read_lora_key(adapter.lora, "init_lora_weights", value);
  value.error("\"", init, "\" begins by taking a part of the base model's weights away that ",
              init.starts_with("pissa_niter_") ? "chance has a share in" : "Sherd does not find",
              ": have PEFT convert the adapter to LoRA (save_pretrained() with "
              "path_initial_model_for_weight_conversion)");
}

/// As PEFT has it: true, or a name.
Json init_of(const config::LoraKeys& lora) {
  switch (lora.init) {
    case config::LoraInit::uniform:
      return true;
    case config::LoraInit::gaussian:
      return "gaussian";
    case config::LoraInit::pissa:
      return "pissa";
    case config::LoraInit::olora:
      return "olora";
  }
  fail(ErrorKind::usage, "an unknown way to begin");
}

/// A list, lists by module, or null.
Json indices_of(const config::LoraKeys& lora) {
  const auto& all = lora.token_indices;
  if (all.empty()) return nullptr;
  if (all.size() == 1 && all[0].first.empty()) return all[0].second;
  Json out = Json::object();
  for (const auto& [module, ids] : all) out[module] = ids;
  return out;
}

void read_peft_key(Adapter& adapter, const std::string& name, const Value& value) {
  const bool lora = adapter.type == AdapterType::lora, prompt = adapter.has_prompt();
  if (name == "peft_type") return;
  if (name == "num_virtual_tokens" && prompt)
    adapter.prompt.virtual_tokens = value.integer(1, config::most_virtual_tokens);
  else if (name == "num_transformer_submodules" && prompt)
    value.integer(1, 1);
  else if (name == "target_modules" && !prompt)
    adapter.targets = names_in(value);
  else if (name == "exclude_modules" && !prompt)
    adapter.exclude = names_in(value);
  else if (name == "modules_to_save" && !prompt)
    adapter.modules_to_save = names_in(value);
  else if (name == "target_parameters" && lora)
    adapter.lora.target_parameters = names_in(value);
  else if ((name == "rank_pattern" || name == "alpha_pattern" || name == "layers_to_transform" ||
            name == "trainable_token_indices") &&
           lora) {
    if (value.node.is(Node::Kind::null)) return;
    config::read_lora_key(adapter.lora, name, value);
  } else if (name == "layers_pattern" && lora)
    return;  // how the file's own model calls its list of blocks
  else if (name == "feedforward_modules" && adapter.type == AdapterType::ia3)
    return;  // checked against the tensors' shapes
  else if (name == "r" && lora)
    adapter.lora.rank = value.integer(1, config::most_adapter_rank);
  else if (name == "lora_alpha" && lora)
    adapter.lora.alpha = value.real(0, config::infinity, true);
  else if (name == "lora_dropout" && lora)
    adapter.lora.dropout = value.real(0, 0.999);
  else if (name == "init_lora_weights" && lora)
    read_init(adapter, value);
  else if (name == "use_rslora" && lora)
    adapter.lora.rslora = value.boolean();
  else if (name == "use_dora" && lora)
    adapter.lora.dora = value.boolean();
  else if (!is_among(idle_of_peft, name) && !config::is_off(value.node))
    refuse(value);
}

}  // namespace

bool is_pattern(const std::string& target) {
  return target.find_first_of("\\^$*+?()[]{}|") != std::string::npos;
}

bool keeps_weights_tied(std::string_view text, const std::string& name) {
  const Node tree = config::parse_tree(text, name);
  const Node* tying = tree.find("ensure_weight_tying");
  return tying && tying->is(Node::Kind::boolean) && tying->boolean;
}

std::string base_in(std::string_view text, const std::string& name) {
  const Node tree = config::parse_tree(text, name);
  const Node* base = tree.find("base_model_name_or_path");
  return base && base->is(Node::Kind::string) ? base->text : std::string();
}

Adapter from_peft(std::string_view text, const std::string& name) {
  const Node tree = config::parse_tree(text, name);
  config::Context context;
  const Value file{tree, "", context};
  file.expect(Node::Kind::object);
  const Node* type = tree.find("peft_type");
  Adapter adapter;
  if (type && type->is_text("LORA")) adapter.type = AdapterType::lora;
  if (type && type->is_text("IA3")) adapter.type = AdapterType::ia3;
  if (type && (type->is_text("PROMPT_TUNING") || type->is_text("P_TUNING")))
    adapter.type = AdapterType::prompt_tuning, adapter.prompt.virtual_tokens = 0;
  if (adapter.type == AdapterType::none)
    fail(ErrorKind::config, name, ": peft_type is ", type ? type->brief() : "missing",
         ": Sherd has LORA, IA3, PROMPT_TUNING and P_TUNING");
  for (const auto& [key, node] : tree.members)
    context.attempt([&] { read_peft_key(adapter, key, {node, key, context}); });
  context.raise();
  if (adapter.has_prompt() && adapter.prompt.virtual_tokens == 0)
    fail(ErrorKind::config, name, ": num_virtual_tokens is missing: the file does not describe a prompt");
  return adapter;
}

std::string to_peft(const Adapter& adapter, const std::vector<std::string>& targets,
                    const std::vector<std::string>& feedforward, bool transposed, const std::string& base,
                    bool tied, const std::string& task) {
  const bool lora = adapter.type == AdapterType::lora;
  Json out{{"peft_type", lora ? "LORA" : "IA3"},
           {"task_type", task.empty() ? Json() : Json(task)},
           {"base_model_name_or_path", base_name(base)},
           {"inference_mode", true},
           {"target_modules", targets},
           {"modules_to_save", adapter.modules_to_save.empty() ? Json() : Json(adapter.modules_to_save)},
           {"ensure_weight_tying", tied && !adapter.modules_to_save.empty()},
           {"fan_in_fan_out", transposed}};
  if (lora)
    out.update({{"target_parameters",
                 adapter.lora.target_parameters.empty() ? Json() : Json(adapter.lora.target_parameters)},
                {"r", adapter.lora.rank},
                {"lora_alpha", adapter.lora.alpha},
                {"lora_dropout", adapter.lora.dropout},
                {"use_rslora", adapter.lora.rslora},
                {"use_dora", adapter.lora.dora},
                {"bias", "none"},
                {"init_lora_weights", init_of(adapter.lora)},
                {"trainable_token_indices", indices_of(adapter.lora)},
                {"rank_pattern", object_of(adapter.lora.rank_pattern)},
                {"alpha_pattern", object_of(adapter.lora.alpha_pattern)},
                {"layers_to_transform", adapter.lora.layers.empty() ? Json() : Json(adapter.lora.layers)}});
  else
    out.update({{"feedforward_modules", feedforward}, {"init_ia3_weights", true}});
  if (!adapter.exclude.empty()) out["exclude_modules"] = adapter.exclude;
  return out.dump(2) + "\n";
}

std::string to_peft(const Adapter& adapter, const PromptedModel& model) {
  const bool encoded = adapter.type == AdapterType::p_tuning;
  Json out{{"peft_type", encoded ? "P_TUNING" : "PROMPT_TUNING"},
           {"task_type", "CAUSAL_LM"},
           {"base_model_name_or_path", base_name(model.base)},
           {"inference_mode", true},
           {"num_virtual_tokens", adapter.prompt.virtual_tokens},
           {"token_dim", model.hidden},
           {"num_transformer_submodules", 1},
           {"num_attention_heads", model.heads},
           {"num_layers", model.layers}};
  const std::int64_t hidden = adapter.prompt.encoder_hidden_size;
  if (encoded)
    out.update({{"encoder_reparameterization_type", "MLP"},
                {"encoder_hidden_size", hidden > 0 ? hidden : model.hidden}});
  else
    out["prompt_tuning_init"] = "RANDOM";
  return out.dump(2) + "\n";
}

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
    if (!is_among(idle_of_hub, member.first) && !config::is_off(member.second))
      context.attempt([&] { refuse({member.second, "config." + member.first, context}); });
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
                 {"model_class", nullptr},     {"model_name", base_name(base)},
                 {"model_type", model_type},   {"name", keys.name},
                 {"version", "adapters.1.3.0"}};
  return out.dump(2) + "\n";
}

}  // namespace sherd::models

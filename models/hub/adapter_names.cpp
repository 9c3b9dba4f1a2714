#include "models/hub/adapter_names.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <regex>
#include <set>

#include "base/text/excerpt.h"
#include "models/hub/adapter_config.h"

namespace sherd::models {

using config::AdapterType;
using tensor::Shape;

namespace {

constexpr const char* down = "mlp.down";

/// "model.layers.0.self_attn.q_proj" of the published weight.
std::string module_of(const PublishedTensor& tensor) {
  return tensor.name.substr(0, tensor.name.rfind('.'));
}

/// Whether all of a module's name is as the regular expression says, or an end of it behind a dot. Throws
/// Error{config} naming the key.
bool matches_pattern(const std::string& module, const std::string& pattern, const char* key,
                     bool also_ends = false) {
  try {
    return std::regex_match(module, std::regex(also_ends ? cat("(.*\\.)?(", pattern, ")") : pattern));
  } catch (const std::regex_error& error) {
    fail(ErrorKind::config, "training.adapter.", key, ": '", excerpt(pattern, 80),
         "' is no regular expression of ECMAScript: ", error.what());
  }
}

bool matches(const std::string& module, const std::string& target, const char* key = "targets") {
  if (target == "all-linear" || module == target || module.ends_with("." + target)) return true;
  return is_pattern(target) && matches_pattern(module, target, key);
}

/// The numbers behind the first pattern that fits an end of the module's name; else `otherwise`.
template <class N>
N by_pattern(const std::vector<std::pair<std::string, N>>& patterns, const std::string& module,
             const char* key, N otherwise) {
  for (const auto& [pattern, number] : patterns)
    if (matches_pattern(module, pattern, key, true)) return number;
  return otherwise;
}

/// The number of the block that a module's name has; -1: none.
std::int64_t block_of(const std::string& module);

/// Whether the tensor's module is called by one of these.
bool is_named(const PublishedTensor& tensor, const std::vector<std::string>& names, const char* key) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return matches(module_of(tensor), name, key); });
}
bool is_target(const config::Adapter& adapter, const PublishedTensor& tensor) {
  return is_named(tensor, adapter.targets, "targets");
}

bool is_chosen(const config::Adapter& adapter, const PublishedTensor& tensor) {
  const std::vector<std::int64_t>& layers = adapter.lora.layers;
  return is_target(adapter, tensor) && !is_named(tensor, adapter.exclude, "exclude") &&
         (layers.empty() || std::binary_search(layers.begin(), layers.end(), block_of(module_of(tensor))));
}

/// The tensors of a published weight that have an adapter.
std::vector<int> chosen(const config::Adapter& adapter, const PublishedParameter& weight) {
  std::vector<int> out;
  for (std::size_t i = 0; i < weight.tensors.size(); ++i)
    if (is_chosen(adapter, weight.tensors[i])) out.push_back(static_cast<int>(i));
  return out;
}

struct LoraShape {
  std::int64_t rank;
  double alpha;
  bool operator==(const LoraShape&) const = default;
};
LoraShape lora_shape(const config::LoraKeys& lora, const PublishedTensor& tensor) {
  const std::string module = module_of(tensor);
  return {by_pattern(lora.rank_pattern, module, "rank_pattern", lora.rank),
          by_pattern(lora.alpha_pattern, module, "alpha_pattern", lora.alpha)};
}

/// The parts of a block that can have an adapter, in a block as all are, or with an encoder in front in the
/// first of each stack.
struct AdaptedPart {
  std::string part, block;
};
std::vector<AdaptedPart> parts_of(const config::Model& model) {
  std::vector<AdaptedPart> out;
  const auto append = [&](std::int64_t block, std::initializer_list<const char*> parts) {
    for (const char* part : parts) out.push_back({part, std::to_string(block)});
  };
  if (model.has_encoder()) {
    append(0, {"attention.q", "attention.kv", "attention.projection", "mlp.up", down});
    append(model.encoder.num_layers,
           {"attention.q", "attention.kv", "attention.projection", "cross_attention.q", "cross_attention.kv",
            "cross_attention.projection", "mlp.up", down});
    return out;
  }
  append(0, {"attention.qkv", "attention.projection"});
  if (model.moe.experts == 0) append(0, {"mlp.up", down});
  return out;
}

PublishedParameter weight_of(const HuggingFaceLayout& layout, const std::string& part,
                             const std::string& block) {
  return layout.published(cat("blocks.", block, ".", part, ".weight"));
}

/// The part behind the block's number: "self_attn.q_proj".
std::string in_block(const std::string& module) {
  return module.substr(module.find(".0.") + std::strlen(".0."));
}

/// Without the number of the block's part, where these have some (T5): "SelfAttention.q".
std::string short_name(const std::string& module) {
  std::string out = in_block(module);
  if (out.starts_with("layer.")) out = out.substr(out.find('.', std::strlen("layer.")) + 1);
  return out;
}

/// The number of the block that a target's name has, and what is behind it; -1: none has one.
std::pair<std::int64_t, std::string> numbered(const std::string& target) {
  for (std::size_t begin = 0; begin < target.size();) {
    const std::size_t end = std::min(target.find('.', begin), target.size());
    const std::string word = target.substr(begin, end - begin);
    const bool number = !word.empty() && word.size() < 9 &&
                        std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (number && end < target.size()) return {std::stoll(word), target.substr(end + 1)};
    begin = end + 1;
  }
  return {-1, target};
}

std::int64_t block_of(const std::string& module) {
  return numbered(module).first;
}

/// Targets without the numbers of blocks, by which PEFT writes out what "all-linear" meant. Throws where
/// these are not all blocks.
std::vector<std::string> of_all_blocks(const std::vector<std::string>& targets, const config::Model& model,
                                       const HuggingFaceLayout& layout) {
  std::vector<std::string> out;
  std::map<std::pair<std::string, bool>, std::set<std::int64_t>> seen;  // by stack
  for (const std::string& target : targets) {
    if (is_pattern(target)) {
      out.push_back(target);
      continue;
    }
    const auto [block, name] = numbered(target);
    const bool encodes = model.has_encoder() && target.starts_with("encoder.");
    // Behind a stack's own number stand those of its blocks' parts.
    const bool part = model.has_encoder() && !encodes && !target.starts_with("decoder.");
    if (block < 0 || part)
      out.push_back(part ? target : name);
    else
      seen[{name, encodes}].insert(block);
  }
  for (const auto& [of, at] : seen) {
    const auto& [name, in_encoder] = of;
    const std::int64_t blocks =
        in_encoder ? model.encoder.num_layers : model.num_layers - model.encoder.num_layers;
    const bool whole = std::ssize(at) == blocks && *at.rbegin() == blocks - 1;
    if (!whole && !model.has_encoder()) {  // as they are
      for (const std::string& target : targets)
        if (numbered(target).second == name && !is_pattern(target)) out.push_back(target);
      continue;
    }
    if (!whole)
      fail(ErrorKind::config, "training.adapter.targets: ", name, " has an adapter in ", at.size(),
           " of the ", blocks,
           " blocks, and adapters are in all of them here: name it without a block's number");
    if (model.has_encoder() && !seen.contains({name, !in_encoder}))
      for (const auto& [part, block] : parts_of(model))
        for (const PublishedTensor& tensor : weight_of(layout, part, block).tensors)
          if (matches(module_of(tensor), name) && module_of(tensor).starts_with("encoder.") != in_encoder)
            fail(ErrorKind::config, "training.adapter.targets: ", name, " has an adapter in the ",
                 in_encoder ? "encoder" : "decoder",
                 " alone, and adapters are in both here: name it without a block's number");
    if (std::find(out.begin(), out.end(), name) == out.end()) out.push_back(name);
  }
  return out;
}

void check_targets(const config::Adapter& adapter, const config::Model& model,
                   const HuggingFaceLayout& layout) {
  std::vector<std::string> modules;
  std::vector<std::string> shorts;
  for (const auto& [part, block] : parts_of(model))
    for (const PublishedTensor& tensor : weight_of(layout, part, block).tensors) {
      modules.push_back(module_of(tensor));
      const std::string name = short_name(modules.back());
      if (std::find(shorts.begin(), shorts.end(), name) == shorts.end()) shorts.push_back(name);
    }
  std::string there;
  for (const std::string& name : shorts) there += cat(there.empty() ? "" : ", ", name);
  const bool experts = model.moe.experts > 0;
  const std::int64_t blocks = model.has_encoder() ? 1 : model.num_layers;
  for (const std::string& target : adapter.targets) {
    bool found = std::any_of(modules.begin(), modules.end(),
                             [&](const std::string& module) { return matches(module, target); });
    for (std::int64_t block = 1; !found && block < blocks; ++block)
      for (const auto& [part, first] : parts_of(model))
        for (const PublishedTensor& tensor : weight_of(layout, part, std::to_string(block)).tensors)
          found = found || matches(module_of(tensor), target);
    if (found && !(experts && target == "all-linear")) continue;
    std::vector<std::string> names{"all-linear"};
    for (const std::string& module : modules) names.push_back(short_name(module));
    const std::string close = target == "all-linear" ? "" : nearest(target, names);
    fail(ErrorKind::config,
         "training.adapter.targets: ", target == "all-linear" ? "" : "no module is called ", "'", target, "'",
         close.empty() ? "" : cat(" (did you mean '", close, "'?)"),
         target == "all-linear" ? " would be experts' weights too, which have no adapters yet: " : "; ",
         "there are ", there,
         experts && target != "all-linear" ? " (experts' weights have no adapters yet)" : "");
  }
}

/// The ranks and alphas by which modules are packed in the model's layers, and what they name. Throws.
void check_lora(const config::Adapter& adapter, const config::Model& model, const HuggingFaceLayout& layout) {
  const config::LoraKeys& lora = adapter.lora;
  if (!lora.layers.empty() && model.has_encoder())
    fail(ErrorKind::config, "training.adapter.layers is for models without an encoder in front");
  if (!lora.layers.empty() && lora.layers.back() >= model.num_layers)
    fail(ErrorKind::config, "training.adapter.layers: there is no block ", lora.layers.back(), " among ",
         model.num_layers);
  std::vector<std::string> modules;
  const std::int64_t blocks = model.has_encoder() ? 1 : model.num_layers;
  for (std::int64_t block = 0; block < blocks; ++block)
    for (const auto& [part, first] : parts_of(model)) {
      const PublishedParameter weight =
          weight_of(layout, part, model.has_encoder() ? first : std::to_string(block));
      const PublishedTensor* other = nullptr;
      for (const int i : chosen(adapter, weight)) {
        const PublishedTensor& tensor = weight.tensors[static_cast<std::size_t>(i)];
        modules.push_back(module_of(tensor));
        if (!other) other = &tensor;
        if (lora_shape(lora, tensor) != lora_shape(lora, *other))
          fail(ErrorKind::config, "training.adapter: ", module_of(*other), " and ", module_of(tensor),
               " are one layer here, whose adapters have one rank and one alpha: give them the same in "
               "rank_pattern and alpha_pattern");
      }
    }
  for (const std::string& name : adapter.exclude) {
    bool found = false;
    for (std::int64_t block = 0; block < blocks; ++block)
      for (const auto& [part, first] : parts_of(model))
        for (const PublishedTensor& tensor :
             weight_of(layout, part, model.has_encoder() ? first : std::to_string(block)).tensors)
          found = found || (is_target(adapter, tensor) && matches(module_of(tensor), name, "exclude"));
    if (!found)
      fail(ErrorKind::config, "training.adapter.exclude: '", name, "' is no module that targets name");
  }
  if (modules.empty())
    fail(ErrorKind::config, "training.adapter: no module is left that targets, exclude and layers name");
  const auto check = [&](const auto& patterns, const char* key) {
    for (const auto& [pattern, number] : patterns)
      if (std::none_of(modules.begin(), modules.end(), [&, &of = pattern](const std::string& module) {
            return matches_pattern(module, of, key, true);
          }))
        fail(ErrorKind::config, "training.adapter.", key, ": '", pattern, "' fits no module with an adapter");
  };
  check(lora.rank_pattern, "rank_pattern");
  check(lora.alpha_pattern, "alpha_pattern");
}

/// The table of tokens and the head: the names of their published modules, and of the parameter.
std::vector<std::pair<std::string, std::string>> modules_beside(const GptConfig& model,
                                                                const HuggingFaceLayout& layout) {
  const std::string head = layout.head().substr(0, layout.head().rfind('.'));
  std::vector<std::pair<std::string, std::string>> out{
      {module_of(layout.published("tokens.weight").tensors[0]), "tokens.weight"},
      {head, model.tied() ? "tokens.weight" : "head.weight"}};
  if (!model.tied() && model.head != config::Head::lm) out.pop_back();  // an encoder's has layers in front
  return out;
}

/// By a name, or an end of one, alone.
bool is_called(const std::string& module, const std::string& name) {
  return module == name || module.ends_with("." + name);
}

void check_saved(const config::Adapter& adapter, const GptConfig& model, const HuggingFaceLayout& layout) {
  if (std::find(adapter.exclude.begin(), adapter.exclude.end(), "all-linear") != adapter.exclude.end())
    fail(ErrorKind::config, "training.adapter.exclude: \"all-linear\" would leave no module");
  const auto there = modules_beside(model, layout);
  for (const std::string& name : adapter.modules_to_save)
    if (std::none_of(there.begin(), there.end(), [&](const auto& of) { return is_called(of.first, name); })) {
      std::string names;
      for (const auto& [module, parameter] : there) names += cat(names.empty() ? "" : ", ", module);
      fail(ErrorKind::config, "training.adapter.modules_to_save: '", name,
           "' is none of those that can be trained whole beside an adapter: ", names);
    }
}

/// PEFT's name of a tensor of a module's adapter.
PublishedTensor of_peft(const PublishedTensor& weight, const char* kind, Shape shape) {
  return {cat("base_model.model.", module_of(weight), ".", kind), shape, false};
}

/// The outputs of a published weight.
std::int64_t outputs(const PublishedTensor& weight) {
  return weight.shape[weight.transposed ? 1 : 0];
}

}  // namespace

std::string adapter_stem(AdapterType type) {
  return type == AdapterType::bottleneck ? "adapter" : "adapter_model";
}

config::Adapter resolved_adapter(const config::Adapter& adapter, const GptConfig& model) {
  config::Adapter out = adapter;
  if (model.has_encoder() && adapter.type != AdapterType::lora && adapter.type != AdapterType::ia3)
    fail(ErrorKind::config, "training.adapter.type ", config::name_of(adapter.type),
         " is yet to come for models with an encoder in front (model.encoder): take lora or ia3");
  if (adapter.type != AdapterType::lora && adapter.type != AdapterType::ia3) return out;
  if (model.mla.kv_lora_rank > 0)
    fail(ErrorKind::config, "training.adapter.type ", config::name_of(adapter.type),
         " is yet to come for latent attention (model.mla): train the whole model, or take prompt_tuning or "
         "bottleneck");
  if (model.any_linear() || model.attention_gate)
    fail(ErrorKind::config, "training.adapter.type ", config::name_of(adapter.type),
         " is yet to come for linear attention and for gates of attention: train the whole model, or take "
         "prompt_tuning or bottleneck");
  const Family& family = family_of(model.type);
  const HuggingFaceLayout layout(model);
  out.targets = of_all_blocks(adapter.targets, model, layout);
  if (out.targets.empty())
    out.targets = adapter.type == AdapterType::lora ? family.lora_targets : family.ia3_targets;
  check_targets(out, model, layout);
  check_lora(out, model, layout);
  check_saved(out, model, layout);
  return out;
}

std::vector<std::string> saved_parameters(const GptConfig& model) {
  std::vector<std::string> out;
  if (model.adapter.modules_to_save.empty()) return out;
  for (const auto& [module, parameter] : modules_beside(model, HuggingFaceLayout(model)))
    for (const std::string& name : model.adapter.modules_to_save)
      if (is_called(module, name) && std::find(out.begin(), out.end(), parameter) == out.end())
        out.push_back(parameter);
  return out;
}

PublishedParameter published_prompt(const GptConfig& model, const std::string& kind) {
  require(kind == "prompt", "PEFT's files of prompts hold no '", kind, "'");
  const std::int64_t rows = model.adapter.prompt.prompts() * model.adapter.virtual_tokens();
  return {.tensors = {{"prompt_embeddings", {rows, model.hidden_size}}},
          .rows = {{0, rows, 0, 0}},
          .columns = model.hidden_size};
}

PublishedParameter published_bottleneck(const GptConfig& model, const std::string& block,
                                        const std::string& parameter) {
  const std::size_t end = parameter.find('_'), dot = parameter.find('.');
  require(end < dot && dot != std::string::npos, "no parameter of an adapter is called '", parameter, "'");
  const std::string part = parameter.substr(0, end), direction = parameter.substr(end + 1, dot - end - 1),
                    kind = parameter.substr(dot + 1);
  const bool goes_down = direction == "down";
  const config::BottleneckKeys& keys = model.adapter.bottleneck;
  const std::int64_t width = model.hidden_size, size = keys.width(width);
  const std::int64_t rows = goes_down ? size : width, columns = goes_down ? width : size;
  const std::string name = cat(block, part == "mlp" ? "output" : part, "_adapters.adapters.", keys.name,
                               goes_down ? ".adapter_down.0." : ".adapter_up.", kind);
  if (kind == "bias") return {.tensors = {{name, {rows}}}, .rows = {{0, rows, 0, 0}}};
  return {.tensors = {{name, {rows, columns}}}, .rows = {{0, rows, 0, 0}}, .columns = columns};
}

PublishedParameter published_adapter(const config::Adapter& adapter, const PublishedParameter& weight,
                                     const std::string& kind, bool of_inputs) {
  const std::vector<int> tensors = chosen(adapter, weight);
  const std::int64_t r =
      tensors.empty()
          ? adapter.lora.rank
          : lora_shape(adapter.lora, weight.tensors[static_cast<std::size_t>(tensors.front())]).rank;
  PublishedParameter out;
  if (kind == "lora_A" || (kind == "ia3" && of_inputs)) {
    const bool lora = kind == "lora_A";
    out.columns = lora ? weight.columns : 1;
    for (const int i : tensors) {
      const PublishedTensor& tensor = weight.tensors[static_cast<std::size_t>(i)];
      const std::int64_t rows = lora ? r : weight.columns;
      out.rows.push_back({rows * std::ssize(out.tensors), rows, static_cast<int>(out.tensors.size()), 0});
      out.tensors.push_back(lora ? of_peft(tensor, "lora_A.weight", {r, weight.columns})
                                 : of_peft(tensor, "ia3_l", {1, weight.columns}));
    }
    return out;
  }
  require(kind == "lora_B" || kind == "ia3" || kind == "magnitude", "no parameter of an adapter is called '",
          kind, "'");
  out.columns = kind == "lora_B" ? r : 1;
  std::vector<int> place(weight.tensors.size(), -1);
  for (const int i : tensors) {
    const PublishedTensor& tensor = weight.tensors[static_cast<std::size_t>(i)];
    place[static_cast<std::size_t>(i)] = static_cast<int>(out.tensors.size());
    out.tensors.push_back(kind == "lora_B" ? of_peft(tensor, "lora_B.weight", {outputs(tensor), r})
                          : kind == "ia3"  ? of_peft(tensor, "ia3_l", {outputs(tensor), 1})
                                           : of_peft(tensor, "lora_magnitude_vector", {outputs(tensor)}));
  }
  std::int64_t row = 0;
  for (const PublishedParameter::RowRun& run : weight.rows) {
    if (run.tensor < 0 || place[static_cast<std::size_t>(run.tensor)] < 0) continue;
    out.rows.push_back({row, run.rows, place[static_cast<std::size_t>(run.tensor)], run.tensor_row});
    row += run.rows;
  }
  return out;
}

std::string adapter_config(const config::Adapter& adapter, const GptConfig& model, const std::string& base) {
  if (adapter.type == AdapterType::bottleneck)
    return to_adapter_hub(adapter, model.hidden_size, family_of(model.type).name, base);
  if (adapter.has_prompt())
    return to_peft(adapter, {model.hidden_size, model.num_layers, model.num_heads, base});
  const HuggingFaceLayout layout(model);
  const std::vector<AdaptedPart> parts = parts_of(model);
  // The short name, but where a module without an adapter has it too.
  const auto target_name = [&](const PublishedTensor& of) {
    const std::string module = module_of(of), name = short_name(module);
    for (const auto& [part, block] : parts)
      for (const PublishedTensor& tensor : weight_of(layout, part, block).tensors)
        if (!is_target(model.adapter, tensor) && matches(module_of(tensor), name)) return in_block(module);
    return name;
  };
  std::vector<std::string> targets, feedforward;
  bool transposed = false;
  config::Adapter written = adapter;
  // What short names cannot say PEFT is told by the modules' whole names.
  const bool whole_names =
      !model.has_encoder() &&
      (!model.adapter.exclude.empty() ||
       std::any_of(model.adapter.targets.begin(), model.adapter.targets.end(),
                   [](const std::string& target) { return is_pattern(target) || block_of(target) >= 0; }));
  const std::int64_t blocks = whole_names ? model.num_layers : 1;
  if (whole_names) written.exclude.clear(), written.lora.layers.clear();
  for (std::int64_t number = 0; number < blocks; ++number)
    for (const auto& [part, block] : parts)
      for (const PublishedTensor& tensor :
           weight_of(layout, part, whole_names ? std::to_string(number) : block).tensors) {
        transposed = transposed || tensor.transposed;
        if (!(whole_names ? is_chosen(model.adapter, tensor) : is_target(model.adapter, tensor))) continue;
        const std::string name = whole_names ? module_of(tensor) : target_name(tensor);
        if (std::find(targets.begin(), targets.end(), name) != targets.end()) continue;
        targets.push_back(name);
        if (part == down) feedforward.push_back(name);
      }
  if (model.tied() && !saved_parameters(model).empty())  // by this name PEFT keeps both as one
    written.modules_to_save = {layout.head().substr(0, layout.head().rfind('.'))};
  return to_peft(written, targets, feedforward, transposed, base, model.tied(),
                 !model.causal         ? ""
                 : model.has_encoder() ? "SEQ_2_SEQ_LM"
                                       : "CAUSAL_LM");
}

AdaptedWeight adapted_weight(const GptConfig& model, const std::string& layer) {
  AdaptedWeight out;
  const std::size_t block = std::strlen("blocks.");
  const std::size_t dot = layer.starts_with("blocks.") ? layer.find('.', block) : std::string::npos;
  if (dot == std::string::npos) return out;
  const std::string part = layer.substr(dot + 1);
  const std::vector<AdaptedPart> parts = parts_of(model);
  if (std::none_of(parts.begin(), parts.end(), [&](const AdaptedPart& each) { return each.part == part; }))
    return out;
  out.weight = weight_of(HuggingFaceLayout(model), part, layer.substr(block, dot - block));
  out.tensors = chosen(model.adapter, out.weight);
  out.of_inputs = part == down;
  if (out.tensors.empty()) return out;
  const config::LoraKeys& lora = model.adapter.lora;
  const auto [rank, alpha] =
      lora_shape(lora, out.weight.tensors[static_cast<std::size_t>(out.tensors.front())]);
  out.rank = rank, out.scale = lora.scale(rank, alpha);
  return out;
}

}  // namespace sherd::models

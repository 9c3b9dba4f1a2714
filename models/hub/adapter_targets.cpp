#include "models/hub/adapter_targets.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <regex>
#include <set>

#include "base/text/excerpt.h"
#include "models/hub/adapter_config.h"
#include "models/hub/adapter_tables.h"

namespace sherd::models {

using config::AdapterType;

namespace {

/// A regular expression for all of a name; `also_ends`: or for an end of it behind a dot. Compiled once: a
/// model of many experts has thousands of names. Throws Error{config} naming the key.
const std::regex& compiled(const std::string& pattern, const char* key, bool also_ends) {
  thread_local std::map<std::string, std::regex> known;
  constexpr std::size_t most = 8192;  // more than a configuration has
  const std::string text = also_ends ? cat("(.*\\.)?(", pattern, ")") : pattern;
  if (const auto found = known.find(text); found != known.end()) return found->second;
  if (known.size() >= most) known.clear();
  try {
    return known.emplace(text, std::regex(text)).first->second;
  } catch (const std::regex_error& error) {
    fail(ErrorKind::config, "training.adapter.", key, ": '", excerpt(pattern, 80),
         "' is no regular expression of ECMAScript: ", error.what());
  }
}

bool matches_pattern(const std::string& module, const std::string& pattern, const char* key,
                     bool also_ends = false) {
  return std::regex_match(module, compiled(pattern, key, also_ends));
}

bool matches(const std::string& module, const std::string& target, const char* key) {
  if (target == "all-linear" || is_called(module, target)) return true;
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

/// Whether the tensor's module is called by one of these.
bool is_named(const PublishedTensor& tensor, const std::vector<std::string>& names, const char* key) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return matches(module_of(tensor), name, key); });
}

bool is_target_parameter(const config::Adapter& adapter, const PublishedTensor& tensor) {
  const std::vector<std::string>& names = adapter.lora.target_parameters;
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return is_called(tensor.name, name); });
}

bool is_chosen(const config::Adapter& adapter, const PublishedTensor& tensor) {
  if (tensor.stacked > 0) return is_target_parameter(adapter, tensor);
  const std::vector<std::int64_t>& layers = adapter.lora.layers;
  return is_named(tensor, adapter.targets, "targets") && !is_named(tensor, adapter.exclude, "exclude") &&
         (layers.empty() ||
          std::binary_search(layers.begin(), layers.end(), numbered(module_of(tensor)).first));
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

/// The parts of a block that can have an adapter; of its experts those from `first` on, `experts` of them.
std::vector<std::string> adaptable_parts(const GptConfig& model, std::int64_t block, std::int64_t first,
                                         std::int64_t experts) {
  if (model.has_encoder()) {
    std::vector<std::string> out{"attention.q", "attention.kv", "attention.projection", "mlp.up", "mlp.down"};
    if (!model.encodes(block))
      out.insert(out.begin() + 3, {"cross_attention.q", "cross_attention.kv", "cross_attention.projection"});
    return out;
  }
  std::vector<std::string> out{"attention.qkv", "attention.projection"};
  const auto append = [&](const std::string& part) {
    out.push_back(part + ".up"), out.push_back(part + ".down");
  };
  if (model.moe.experts == 0) append("mlp");
  if (model.moe.experts == 0 || model.adapter.type != AdapterType::lora) return out;
  if (!model.moe.in(block)) {
    append("mlp");
    return out;
  }
  if (model.moe.shared_experts > 0) append("mlp.shared");
  for (std::int64_t e = first; e < first + experts; ++e) append(cat("mlp.experts.", e));
  return out;
}

/// A layer's weight as its adapter has it, before any tensor is chosen: of an expert whose weight is trained
/// among all experts' as they are in one tensor, else as the model's files have it.
PublishedParameter weight_of(const config::Adapter& adapter, const HuggingFaceLayout& layout,
                             const std::string& layer) {
  if (!adapter.lora.target_parameters.empty())
    if (auto stacked = layout.among_experts(layer + ".weight");
        stacked && is_target_parameter(adapter, stacked->tensors[0]))
      return *stacked;
  return layout.published(layer + ".weight");
}

AdaptedWeight adapted(const GptConfig& model, const HuggingFaceLayout& layout, const std::string& layer) {
  const config::Adapter& adapter = model.adapter;
  AdaptedWeight out{.weight = weight_of(adapter, layout, layer)};
  out.of_inputs = layer.ends_with("mlp.down");
  for (std::size_t i = 0; i < out.weight.tensors.size(); ++i)
    if (is_chosen(adapter, out.weight.tensors[i])) out.tensors.push_back(static_cast<int>(i));
  if (out.tensors.empty()) return out;
  const auto [rank, alpha] =
      lora_shape(adapter.lora, out.weight.tensors[static_cast<std::size_t>(out.tensors.front())]);
  out.rank = rank, out.scale = adapter.lora.scale(rank, alpha);
  return out;
}

/// The modules of all tensors of such layers, experts' weights in one tensor left out.
std::vector<std::string> modules(const GptConfig& model, Layers which) {
  std::vector<std::string> out;
  for_each_adaptable(model, which, [&](const std::string&, const AdaptedWeight& layer) {
    for (const PublishedTensor& tensor : layer.weight.tensors)
      if (tensor.stacked == 0) out.push_back(module_of(tensor));
  });
  return out;
}

/// Targets without the numbers of blocks, by which PEFT writes out what "all-linear" meant. Throws where
/// these are not all blocks.
std::vector<std::string> of_all_blocks(const GptConfig& model) {
  const std::vector<std::string>& targets = model.adapter.targets;
  std::vector<std::string> out;
  std::map<std::pair<std::string, bool>, std::set<std::int64_t>> seen;  // by stack
  for (const std::string& target : targets) {
    if (is_pattern(target)) {
      out.push_back(target);
      continue;
    }
    const auto [block, name] = numbered(target);
    const bool encodes = model.has_encoder() && target.starts_with("encoder.");
    // Behind a stack's own number stand those of its blocks' parts, and behind "experts" those of experts.
    const bool part = (model.has_encoder() && !encodes && !target.starts_with("decoder.")) ||
                      (model.moe.experts > 0 && name.find('.') == std::string::npos);
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
      for (const std::string& module : modules(model, Layers::one_of_a_kind))
        if (is_target_of(module, name) && module.starts_with("encoder.") != in_encoder)
          fail(ErrorKind::config, "training.adapter.targets: ", name, " has an adapter in the ",
               in_encoder ? "encoder" : "decoder",
               " alone, and adapters are in both here: name it without a block's number");
    if (std::find(out.begin(), out.end(), name) == out.end()) out.push_back(name);
  }
  return out;
}

void check_targets(const GptConfig& model) {
  std::vector<std::string> kinds = modules(model, Layers::one_of_a_kind), all, shorts;
  for (const std::string& module : kinds) shorts.push_back(short_name(module));
  for (const std::string& target : model.adapter.targets) {
    const auto finds = [&](const std::vector<std::string>& names) {
      return std::any_of(names.begin(), names.end(),
                         [&](const std::string& module) { return is_target_of(module, target); });
    };
    if (finds(kinds)) continue;
    if (all.empty()) all = modules(model, Layers::all);
    if (finds(all)) continue;
    std::vector<std::string> names{"all-linear"};
    names.insert(names.end(), shorts.begin(), shorts.end());
    const std::string close = nearest(target, names);
    fail(ErrorKind::config, "training.adapter.targets: no module is called '", target, "'",
         close.empty() ? "" : cat(" (did you mean '", close, "'?)"), "; there are ", listed(shorts),
         model.moe.experts == 0 || model.adapter.type != AdapterType::lora ? ""
         : model.adapter.lora.target_parameters.empty()
             ? "; training.adapter.target_parameters names weights of all experts"
             : "; experts' weights that training.adapter.target_parameters names are no modules");
  }
}

/// That each name is one of all experts' weights, and what LoRA has not for these.
void check_target_parameters(const GptConfig& model, const HuggingFaceLayout& layout) {
  const config::LoraKeys& lora = model.adapter.lora;
  std::vector<std::string> there;
  for (std::int64_t block = 0; block < model.num_layers; ++block)
    if (model.moe.in(block))
      for (const char* part : {"up", "down"})
        if (const auto weight =
                layout.among_experts(cat("blocks.", block, ".mlp.experts.0.", part, ".weight")))
          there.push_back(weight->tensors[0].name);
  for (const std::string& name : lora.target_parameters) {
    if (std::any_of(there.begin(), there.end(), [&](const std::string& of) { return is_called(of, name); }))
      continue;
    std::vector<std::string> shorts;
    for (const std::string& of : there) shorts.push_back(numbered(of).second);
    fail(ErrorKind::config, "training.adapter.target_parameters: no weight of experts is called '", name,
         "'; ",
         there.empty() ? "the model has no experts: name modules in training.adapter.targets"
                       : cat("there are ", listed(shorts)),
         there.empty() ? "" : " (routers have no adapters)");
  }
  if (!lora.dora) return;
  for_each_adaptable(model, Layers::all, [](const std::string& layer, const AdaptedWeight& of) {
    if (!of.tensors.empty() && is_of_expert(layer))
      fail(ErrorKind::config,
           "training.adapter.use_dora is not for experts' weights, as in PEFT, and targets or "
           "target_parameters "
           "name ",
           module_of(of.weight.tensors[static_cast<std::size_t>(of.tensors[0])]),
           ": leave these out, or set it to false");
  });
}

/// The ranks and alphas by which modules are packed in the model's layers, and what they name. Throws.
void check_lora(const GptConfig& model) {
  const config::Adapter& adapter = model.adapter;
  const config::LoraKeys& lora = adapter.lora;
  if (!lora.layers.empty() && model.has_encoder())
    fail(ErrorKind::config, "training.adapter.layers is for models without an encoder in front");
  if (!lora.layers.empty() && lora.layers.back() >= model.num_layers)
    fail(ErrorKind::config, "training.adapter.layers: there is no block ", lora.layers.back(), " among ",
         model.num_layers);
  std::vector<std::string> with_adapter;
  std::set<std::string> excluded;
  for_each_adaptable(model, Layers::all, [&](const std::string&, const AdaptedWeight& layer) {
    for (const std::string& name : adapter.exclude)
      for (const PublishedTensor& tensor : layer.weight.tensors)
        if (!excluded.contains(name) && tensor.stacked == 0 && is_named(tensor, adapter.targets, "targets") &&
            matches(module_of(tensor), name, "exclude"))
          excluded.insert(name);
    const PublishedTensor* other = nullptr;
    for (const int i : layer.tensors) {
      const PublishedTensor& tensor = layer.weight.tensors[static_cast<std::size_t>(i)];
      with_adapter.push_back(module_of(tensor));
      if (!other) other = &tensor;
      if (lora_shape(lora, tensor) != lora_shape(lora, *other))
        fail(ErrorKind::config, "training.adapter: ", module_of(*other), " and ", module_of(tensor),
             " are one layer here, whose adapters have one rank and one alpha: give them the same in "
             "rank_pattern and alpha_pattern");
    }
  });
  for (const std::string& name : adapter.exclude)
    if (!excluded.contains(name))
      fail(ErrorKind::config, "training.adapter.exclude: '", name, "' is no module that targets name");
  if (with_adapter.empty())
    fail(ErrorKind::config, "training.adapter: no module is left that targets, exclude and layers name");
  const auto check = [&](const auto& patterns, const char* key) {
    for (const auto& [pattern, number] : patterns) {
      if (std::any_of(with_adapter.begin(), with_adapter.end(),
                      [&, &of = pattern](const std::string& module) {
                        return matches_pattern(module, of, key, true);
                      }))
        continue;
      std::vector<std::string> shorts;
      for (const std::string& module : with_adapter)
        if (module.find(".experts.") == std::string::npos || shorts.size() < 16)
          shorts.push_back(short_name(module));
      fail(ErrorKind::config, "training.adapter.", key, ": '", pattern,
           "' fits no module with an adapter; these are ", listed(shorts));
    }
  };
  check(lora.rank_pattern, "rank_pattern");
  check(lora.alpha_pattern, "alpha_pattern");
}

/// Beginnings that are of no use for some layers.
void check_init(const GptConfig& model) {
  const config::LoraKeys& lora = model.adapter.lora;
  if (!takes_from_base(lora.init)) return;
  constexpr const char* key = "training.adapter.init_lora_weights";
  const char* name = lora.init == config::LoraInit::olora ? "olora" : "pissa";
  if (lora.dora)
    fail(ErrorKind::config, key, ": \"", name, "\" is yet to come with use_dora: leave one of them out");
  for_each_adaptable(model, Layers::all, [&](const std::string& layer, const AdaptedWeight& of) {
    for (const int i : of.tensors) {
      const PublishedTensor& tensor = of.weight.tensors[static_cast<std::size_t>(i)];
      const std::string module = module_of(tensor);
      if (is_of_expert(layer))
        fail(ErrorKind::config, key, ": \"", name, "\" is not for experts' weights, and ", module,
             " is one: leave these out of targets and target_parameters");
      if (tensor.transposed && lora.init == config::LoraInit::olora)
        fail(ErrorKind::config, key,
             ": \"olora\" is not for weights that are published with a row for each "
             "input, as ",
             module, " is, which PEFT takes apart the other way: take \"pissa\"");
      if (2 * of.rank > config::most_adapter_rank)
        fail(ErrorKind::config, key, ": \"", name, "\" is for ranks up to ", config::most_adapter_rank / 2,
             ", as twice the rank is exported, and ", module, " has ", of.rank);
      if (of.rank > std::min(tensor.shape[0], tensor.shape[1]))
        fail(ErrorKind::config, key, ": ", module, " ", tensor.shape.str(), " has no ", of.rank,
             " parts: training.adapter.rank is to be ", std::min(tensor.shape[0], tensor.shape[1]),
             " at most");
    }
  });
}

}  // namespace

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (std::size_t i = 0; i < names.size(); ++i)
    if (std::find(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(i), names[i]) ==
        names.begin() + static_cast<std::ptrdiff_t>(i))
      out += cat(out.empty() ? "" : ", ", names[i]);
  return out;
}

std::string module_of(const PublishedTensor& tensor) {
  return tensor.stacked > 0 ? tensor.name : tensor.name.substr(0, tensor.name.rfind('.'));
}

bool is_called(const std::string& module, const std::string& name) {
  return module == name || module.ends_with("." + name);
}

std::pair<std::int64_t, std::string> numbered(const std::string& module) {
  for (std::size_t begin = 0; begin < module.size();) {
    const std::size_t end = std::min(module.find('.', begin), module.size());
    const std::string word = module.substr(begin, end - begin);
    const bool number = !word.empty() && word.size() < 9 &&
                        std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (number && end < module.size()) return {std::stoll(word), module.substr(end + 1)};
    begin = end + 1;
  }
  return {-1, module};
}

std::string short_name(const std::string& module) {
  std::string out = numbered(module).second;
  if (out.starts_with("layer.")) out = out.substr(out.find('.', std::strlen("layer.")) + 1);
  return out;
}

bool is_target_of(const std::string& module, const std::string& target) {
  return matches(module, target, "targets");
}

void for_each_adaptable(const GptConfig& model, Layers which,
                        const std::function<void(const std::string&, const AdaptedWeight&)>& visit) {
  const HuggingFaceLayout layout(model);
  std::set<bool> seen;  // kinds of blocks
  for (std::int64_t block = 0; block < model.num_layers; ++block) {
    const bool kind =
        model.has_encoder() ? model.encodes(block) : model.moe.experts > 0 && model.moe.in(block);
    const bool one = which == Layers::one_of_a_kind;
    if ((one || model.has_encoder()) && !seen.insert(kind).second) continue;
    for (const std::string& part : adaptable_parts(model, block, 0, one ? 1 : model.moe.experts)) {
      const std::string layer = cat("blocks.", block, ".", part);
      visit(layer, adapted(model, layout, layer));
    }
  }
}

config::Adapter resolved_adapter(const config::Adapter& adapter, const GptConfig& model) {
  if (model.has_encoder() && adapter.type != AdapterType::lora && adapter.type != AdapterType::ia3)
    fail(ErrorKind::config, "training.adapter.type ", config::name_of(adapter.type),
         " is yet to come for models with an encoder in front (model.encoder): take lora or ia3");
  if (adapter.type != AdapterType::lora && adapter.type != AdapterType::ia3) return adapter;
  if (model.mla.kv_lora_rank > 0)
    fail(ErrorKind::config, "training.adapter.type ", config::name_of(adapter.type),
         " is yet to come for latent attention (model.mla): train the whole model, or take prompt_tuning or "
         "bottleneck");
  if (model.any_linear() || model.attention_gate)
    fail(ErrorKind::config, "training.adapter.type ", config::name_of(adapter.type),
         " is yet to come for linear attention and for gates of attention: train the whole model, or take "
         "prompt_tuning or bottleneck");
  GptConfig with = model;
  with.adapter = adapter;
  with.adapter.targets = of_all_blocks(with);
  const Family& family = family_of(model.type);
  if (with.adapter.targets.empty() && adapter.lora.target_parameters.empty())
    with.adapter.targets = adapter.type == AdapterType::lora ? family.lora_targets : family.ia3_targets;
  const HuggingFaceLayout layout(model);
  check_targets(with);
  check_target_parameters(with, layout);
  check_lora(with);
  check_init(with);
  check_tables(with);
  return with.adapter;
}

AdaptedWeight adapted_weight(const GptConfig& model, const std::string& layer) {
  const std::size_t number = std::strlen("blocks.");
  const std::size_t dot = layer.starts_with("blocks.") ? layer.find('.', number) : std::string::npos;
  if (dot == std::string::npos) return {};
  const std::string part = layer.substr(dot + 1), experts = "mlp.experts.";
  const bool of_expert = part.starts_with(experts);
  const std::int64_t expert = of_expert ? std::stoll(part.substr(experts.size())) : 0;
  const std::vector<std::string> parts =
      adaptable_parts(model, std::stoll(layer.substr(number, dot - number)), expert, of_expert ? 1 : 0);
  if (std::find(parts.begin(), parts.end(), part) == parts.end()) return {};
  return adapted(model, HuggingFaceLayout(model), layer);
}

}  // namespace sherd::models

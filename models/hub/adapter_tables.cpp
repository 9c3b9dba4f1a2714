#include "models/hub/adapter_tables.h"

#include <algorithm>

#include "models/hub/adapter_targets.h"

namespace sherd::models {
namespace {

/// The table of tokens and the head: the names of their published modules, and of the parameter.
std::vector<std::pair<std::string, std::string>> modules_beside(const GptConfig& model) {
  const HuggingFaceLayout layout(model);
  const std::string head = layout.head().substr(0, layout.head().rfind('.'));
  std::vector<std::pair<std::string, std::string>> out{
      {module_of(layout.published("tokens.weight").tensors[0]), "tokens.weight"},
      {head, model.tied() ? "tokens.weight" : "head.weight"}};
  if (!model.tied() && model.head != config::Head::lm && !model.gives_rewards())
    out.pop_back();  // an encoder's has layers in front
  return out;
}

void check_saved(const GptConfig& model) {
  const config::Adapter& adapter = model.adapter;
  if (std::find(adapter.exclude.begin(), adapter.exclude.end(), "all-linear") != adapter.exclude.end())
    fail(ErrorKind::config, "training.adapter.exclude: \"all-linear\" would leave no module");
  const auto there = modules_beside(model);
  for (const std::string& name : adapter.modules_to_save)
    if (std::none_of(there.begin(), there.end(), [&](const auto& of) { return is_called(of.first, name); })) {
      std::vector<std::string> names;
      for (const auto& [module, parameter] : there) names.push_back(module);
      fail(ErrorKind::config, "training.adapter.modules_to_save: '", name,
           "' is none of those that can be trained whole beside an adapter: ", listed(names));
    }
}

/// Rows of tokens that are trained, and what cannot be beside them.
void check_tokens(const GptConfig& model) {
  const config::LoraKeys& lora = model.adapter.lora;
  if (lora.token_indices.empty()) return;
  constexpr const char* key = "training.adapter.trainable_token_indices";
  if (model.has_encoder())
    fail(ErrorKind::config, key, " is yet to come for models with an encoder in front (model.encoder)");
  const auto there = modules_beside(model);
  for (const auto& [module, ids] : lora.token_indices) {
    const auto found = std::find_if(there.begin(), there.end(), [&, &name = module](const auto& of) {
      return name.empty() || is_called(of.first, name);
    });
    if (found == there.end() || (model.tied() && found != there.begin()))
      fail(ErrorKind::config, key, ": '", module, "' is ",
           found == there.end() ? "no table of tokens: "
                                : "the table of tokens, which makes the scores, too: ",
           "name ", there[0].first,
           found == there.end() && there.size() > 1 && !model.tied() ? cat(" or ", there[1].first) : "");
    for (const std::int64_t id : ids)
      if (id >= model.vocab_size)
        fail(ErrorKind::config, key, ": there is no id ", id, " in a vocabulary of ", model.vocab_size,
             ": to train vectors of tokens that the model does not have yet, raise model.vocab_size; an "
             "adapter "
             "that has such goes with a model that has them, too (sherd import --adapter, with --set "
             "model.vocab_size)");
    for (const auto& [other, more] : lora.token_indices)
      if (&more != &ids && (other.empty() || is_called(found->first, other)))
        fail(ErrorKind::config, key, ": ", found->first, " is named twice");
    for (const std::string& saved : saved_parameters(model))
      if (saved == found->second)
        fail(ErrorKind::config, key, ": all of ", found->first,
             " is trained already, as training.adapter.modules_to_save says");
  }
}

}  // namespace

void check_tables(const GptConfig& model) {
  check_saved(model);
  check_tokens(model);
}

TrainedTokenIds trained_tokens(const GptConfig& model) {
  TrainedTokenIds out;
  if (model.adapter.lora.token_indices.empty()) return out;
  const auto there = modules_beside(model);
  for (const auto& [module, ids] : model.adapter.lora.token_indices)
    (module.empty() || is_called(there[0].first, module) ? out.of_table : out.of_head) = ids;
  return out;
}

std::vector<std::string> saved_parameters(const GptConfig& model) {
  std::vector<std::string> out;
  if (model.adapter.modules_to_save.empty()) return out;
  for (const auto& [module, parameter] : modules_beside(model))
    for (const std::string& name : model.adapter.modules_to_save)
      if (is_called(module, name) && std::find(out.begin(), out.end(), parameter) == out.end())
        out.push_back(parameter);
  return out;
}

}  // namespace sherd::models

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/adapter.h"

// adapter_config.json: PEFT's, and AdapterHub's.
namespace sherd::models {

/// Whether a name of modules is a regular expression: it has a character that modules' names have not.
bool is_pattern(const std::string& target);

/// Whether such a text says that tied weights stayed tied: a table of tokens that makes the scores, too, was
/// trained as one parameter.
bool keeps_weights_tied(std::string_view text, const std::string& name);

/// The model, by a name or a path, that such a text says the adapter was trained on; empty: it does not say.
std::string base_in(std::string_view text, const std::string& name);

/// Reads PEFT's adapter_config.json; `name` stands for the file in errors. Throws Error{config} naming each
/// key that would change what the adapter computes and that Sherd does not have. Of p-tuning PEFT keeps the
/// computed prompt, without the network: that is an adapter of prompt_tuning.
config::Adapter from_peft(std::string_view text, const std::string& name);

/// An adapter of layers as PEFT's adapter_config.json. `targets`: ends of the names of all modules that have
/// one, `feedforward` among them, which IA³ takes at their input; `transposed`: published weights are
/// [in, out], as GPT-2's are; `base`: a name or path of the model, or empty; `task`: PEFT's task_type, empty
/// for masked tokens, which it does not know.
std::string to_peft(const config::Adapter& adapter, const std::vector<std::string>& targets,
                    const std::vector<std::string>& feedforward, bool transposed, const std::string& base,
                    bool tied, const std::string& task);

/// The numbers of a model that its prompt's adapter_config.json tells.
struct PromptedModel {
  std::int64_t hidden, layers, heads;
  std::string base;  ///< a name or path of the model, or empty
};
/// One prompt as PEFT's adapter_config.json.
std::string to_peft(const config::Adapter& adapter, const PromptedModel& model);

/// Whether an adapter_config.json is AdapterHub's, not PEFT's.
bool is_adapter_hub(std::string_view text, const std::string& name);

/// Reads AdapterHub's adapter_config.json, of `adapters` 1.0 or newer; `name` stands for the file in errors.
/// Throws Error{config} naming each key that would change what the adapter computes and that Sherd does not
/// have.
config::Adapter from_adapter_hub(std::string_view text, const std::string& name);

/// A bottleneck adapter as AdapterHub's adapter_config.json, for a model of that width and transformers'
/// model_type; `base`: a name or path of the model, or empty.
std::string to_adapter_hub(const config::Adapter& adapter, std::int64_t hidden, const std::string& model_type,
                           const std::string& base);

}  // namespace sherd::models

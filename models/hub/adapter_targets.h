#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "models/hub/hugging_face.h"

// Which layers of a model get an adapter: modules by the names under which they are published, and weights of
// all experts by the names that they have in transformers' memory.
namespace sherd::models {

/// The adapter with the targets that it stands for in the resolved model, whose `type` is the family that it
/// is published as. Throws Error{config} for targets that there are not, with a list of those that there are,
/// and for ranks of LoRA that differ in modules that the model's layers pack.
config::Adapter resolved_adapter(const config::Adapter& adapter, const GptConfig& model);

/// A layer's published weight and which of its tensors have an adapter.
struct AdaptedWeight {
  PublishedParameter weight;
  std::vector<int> tensors = {};  ///< none: the layer has no adapter
  bool of_inputs = false;         ///< IA³ multiplies what goes in
  std::int64_t rank = 0;          ///< LoRA's, of all of these tensors
  double scale = 1;               ///< likewise
};
/// The weight of the layer with that path, "blocks.0.attention.qkv"; no tensors for what is no linear layer
/// of a block. Of an expert whose weight LoRA has among all experts' (LoraKeys::target_parameters) it is a
/// part of their tensor, PublishedTensor::stacked.
AdaptedWeight adapted_weight(const GptConfig& model, const std::string& layer);

/// The module of a published weight, "model.layers.0.self_attn.q_proj"; the tensor's name for one of all
/// experts.
std::string module_of(const PublishedTensor& tensor);
/// "a, b", each once.
std::string listed(const std::vector<std::string>& names);
/// Whether that is the module's name, or an end of it behind a dot.
bool is_called(const std::string& module, const std::string& name);
/// The number of the block that a module's name has, and what is behind it; -1: there is none.
std::pair<std::int64_t, std::string> numbered(const std::string& module);
/// A module's name without the number of the block, and of the block's part where parts have one (T5):
/// "SelfAttention.q".
std::string short_name(const std::string& module);
/// Whether that is a target's name: an end of the module's, all of it, or a regular expression for it.
bool is_target_of(const std::string& module, const std::string& target);

/// Which layers are visited.
enum class Layers : std::uint8_t {
  one_of_a_kind,  ///< of one block of each kind, and of one of its experts
  all
};
/// Calls `visit` for each layer that can have an adapter, with its path as adapted_weight() takes it. With an
/// encoder in front of a decoder there is one block of each to visit.
void for_each_adaptable(const GptConfig& model, Layers which,
                        const std::function<void(const std::string& layer, const AdaptedWeight&)>& visit);

}  // namespace sherd::models

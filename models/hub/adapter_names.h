#pragma once

#include <string>
#include <vector>

#include "models/hub/hugging_face.h"

// Adapters as PEFT and AdapterHub publish them: by the modules of the published model, so that a weight that
// packs several of these has several adapters.
namespace sherd::models {

/// The stem of the files' names in which adapters of a type are published.
std::string adapter_stem(config::AdapterType type);

/// The adapter with the targets that it stands for in the resolved model, whose `type` is the family that it
/// is published as. Throws Error{config} for targets that there are not, with a list of those that there are,
/// and for ranks of LoRA that differ in modules that the model's layers pack.
config::Adapter resolved_adapter(const config::Adapter& adapter, const GptConfig& model);

/// A layer's published weight and which of its tensors have an adapter.
struct AdaptedWeight {
  PublishedParameter weight;
  std::vector<int> tensors;  ///< none: the layer has no adapter
  bool of_inputs = false;    ///< IA³ multiplies what goes in
  std::int64_t rank = 0;     ///< LoRA's, of all of these tensors
  double scale = 1;          ///< likewise
};
/// The weight of the layer with that path, "blocks.0.attention.qkv"; no tensors for what is no linear layer
/// of a block.
AdaptedWeight adapted_weight(const GptConfig& model, const std::string& layer);

/// The parameters of the model itself that are trained beside its adapter (Adapter::modules_to_save), which
/// resolved_adapter() gave.
std::vector<std::string> saved_parameters(const GptConfig& model);

/// Where PEFT has a parameter of prompts, "prompt". Throws Error{usage} for another kind: of p-tuning's
/// network PEFT keeps nothing.
PublishedParameter published_prompt(const GptConfig& model, const std::string& kind);

/// Where AdapterHub has a parameter of the networks in a block, "mlp_down.weight"; `block`: the block's own
/// prefix, "model.layers.0.".
PublishedParameter published_bottleneck(const GptConfig& model, const std::string& block,
                                        const std::string& parameter);

/// Where PEFT has an adapter's parameter `kind` ("lora_A", "lora_B", "ia3") of a layer with the published
/// weight `weight`; `of_inputs`: IA³ multiplies what goes in. Throws Error{usage} for another kind.
PublishedParameter published_adapter(const config::Adapter& adapter, const PublishedParameter& weight,
                                     const std::string& kind, bool of_inputs);

/// The text of the adapter_config.json for the model's adapter, whose keys are `adapter` as a configuration
/// has them; `base`: what it is an adapter of, or empty.
std::string adapter_config(const config::Adapter& adapter, const GptConfig& model, const std::string& base);

}  // namespace sherd::models

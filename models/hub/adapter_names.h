#pragma once

#include <string>
#include <vector>

#include "models/hub/hugging_face.h"

// Adapters as PEFT and AdapterHub publish them: by the modules of the published model, so that a weight that
// packs several of these has several adapters.
namespace sherd::models {

/// The stem of the files' names in which adapters of a type are published.
std::string adapter_stem(config::AdapterType type);

/// Where PEFT has a parameter of prompts, "prompt". Throws Error{usage} for another kind: of p-tuning's
/// network PEFT keeps nothing.
PublishedParameter published_prompt(const GptConfig& model, const std::string& kind);

/// Where PEFT has the trained rows of tokens, of "tokens" or "head". Throws Error{usage} for another layer.
PublishedParameter published_rows(const GptConfig& model, const std::string& layer);

/// Where AdapterHub has a parameter of the networks in a block, "mlp_down.weight"; `block`: the block's own
/// prefix, "model.layers.0.".
PublishedParameter published_bottleneck(const GptConfig& model, const std::string& block,
                                        const std::string& parameter);

/// Where PEFT has the adapter's parameter `kind` ("lora_A", "lora_B", "magnitude", "ia3") of the layer with
/// that path ("blocks.0.attention.qkv"). Throws Error{usage} for another kind, and for a layer without one.
PublishedParameter published_adapter(const GptConfig& model, const std::string& layer,
                                     const std::string& kind);

/// The text of the adapter_config.json for the model's adapter, whose keys are `adapter` as a configuration
/// has them; `base`: what it is an adapter of, or empty.
std::string adapter_config(const config::Adapter& adapter, const GptConfig& model, const std::string& base);

}  // namespace sherd::models

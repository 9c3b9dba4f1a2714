#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "models/gguf/gguf_layout.h"
#include "nn/weight_source.h"

namespace sherd::models {

/// Writes the weights of `parameters`, all of a Gpt's in their order, behind `metadata`, to which the model's
/// own keys are appended. `type`: of matrices; norms, biases, routers and tables of positions stay fp32, the
/// table of scores has more bits where others have 4, as have some of q4_k's layers (llama.cpp's Q4_K_M), and
/// rows that are no whole blocks have q8_0, or f16. Holds a part of a matrix at a time, or all of
/// one that is turned. Returns the file's bytes.
/// Throws Error{data} for a value that is not finite, or that f16 does not hold.
std::uint64_t export_to_gguf(const std::filesystem::path& file, GgufMetadata metadata,
                             const GgufLayout& layout, const std::vector<nn::ParameterPtr>& parameters,
                             nn::WeightSource& weights, device::Device& device, GgufType type);

/// The same of LoRA alone, for a file of the model. Throws Error{config} for an adapter that llama.cpp does
/// not read.
std::uint64_t export_lora_to_gguf(const std::filesystem::path& file, GgufMetadata metadata,
                                  const GgufLayout& layout, const std::vector<nn::ParameterPtr>& parameters,
                                  nn::WeightSource& weights, device::Device& device, GgufType type);

}  // namespace sherd::models

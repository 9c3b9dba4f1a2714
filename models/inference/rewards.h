#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "models/inference/generate.h"

namespace sherd::models {

/// The rewards that a model with such a head gives texts of tokens, 1 to seq_length each, by their last
/// token, `batch` texts at a time, those of like lengths together. All ranks of a sharded model call it
/// alike, and get all of them. Throws Error{usage} for a text of another length, or a model without such a
/// head. `told` hears after each batch how many texts are through.
std::vector<double> reward_texts(Gpt& model, const RunPass& run,
                                 std::span<const std::vector<std::int32_t>> texts, std::int64_t batch,
                                 const std::function<void(std::size_t)>& told = {});

}  // namespace sherd::models

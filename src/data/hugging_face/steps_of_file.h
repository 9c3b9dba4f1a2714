#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "data/hugging_face/steps/steps.h"

namespace sherd::data {

// Parts of a tokenizer.json as the steps that they are: one, or a Sequence of them. Throw Error{data} naming
// what is not supported.
std::vector<NormalizerStep> normalizer_steps(const nlohmann::json& part);
std::vector<PreTokenizerStep> pre_tokenizer_steps(const nlohmann::json& part);
std::vector<DecoderStep> decoder_steps(const nlohmann::json& part);

}  // namespace sherd::data

#pragma once

#include <vector>

#include "data/hugging_face/steps/steps.h"

namespace sherd::data {

// Parts of a tokenizer.json as the steps that they are: one, or a Sequence of them. Throw Error{data} naming
// what is not supported. Json is nlohmann's, which sources alone know.
template <class Json>
std::vector<NormalizerStep> normalizer_steps(const Json& part);
template <class Json>
std::vector<PreTokenizerStep> pre_tokenizer_steps(const Json& part);
template <class Json>
std::vector<DecoderStep> decoder_steps(const Json& part);

}  // namespace sherd::data

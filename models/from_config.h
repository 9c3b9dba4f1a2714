#pragma once

#include <memory>

#include "config/config.h"
#include "models/gpt.h"

namespace sherd::models {

/// The transformer that the config's `model` section describes. `vocabulary`: the dataset's token ids, taken
/// where the section leaves vocab_size out. Throws Error{config} when the section is absent. A model may have
/// fewer ids than the data's tokenizer: texts that use one of the others are refused where they come.
GptOptions gpt_options(const config::Config& config, std::int64_t vocabulary);

}  // namespace sherd::models

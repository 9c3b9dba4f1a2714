#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/token_data.h"

namespace sherd::engine {

/// Throws Error{data} naming both tokenizers where `tokens` were made with another one than the checkpoint's:
/// by kind, number of ids, and the model file's bytes where both are known.
void require_same_tokenizer(const CheckpointReader& reader, const TokenData& tokens);

/// Throws Error{config} naming both where `adapter` has prompts of other tasks, in another order or of
/// another length, than the checkpoint.
void require_same_prompts(const CheckpointReader& reader, const config::Adapter& adapter);

/// How the ranks that saved differ from those here, in number or in how they share the model; empty: not.
std::string layout_change(const Manifest& saved, const comm::Grid& grid);

/// What a run with `config` and `tokens` (null: of another kind) trains otherwise than the one that wrote the
/// checkpoint: a line for each key and for the dataset.
std::vector<std::string> changes_since(const CheckpointReader& reader, const config::Config& config,
                                       const TokenData* tokens);

}  // namespace sherd::engine

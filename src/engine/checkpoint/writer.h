#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "engine/manifest.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// Writes what this rank is to write of the model's states, for the act of saving `save_id`, and what its
/// optimizer has learned of whole parameters, by name. Throws Error{io}.
void write_rank_file(const std::filesystem::path& path, const sharding::ShardedModel& model,
                     device::Device& device, const std::string& save_id,
                     const std::map<std::string, std::string>& learned = {});

/// Puts the tokenizer of the training data, if it is a file, among the checkpoint's. `tokens` may be null.
void write_tokenizer(const std::filesystem::path& folder, const TokenData* tokens, Manifest& manifest);

}  // namespace sherd::engine

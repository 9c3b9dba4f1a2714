#pragma once

#include <string>
#include <vector>

#include "cli/generate_model.h"
#include "cli/prompts_file.h"
#include "data/tokenizer.h"

namespace sherd::cli {

/// What generates: its checkpoint and tokenizer, and how.
struct Request {
  const engine::CheckpointReader& reader;
  const data::Tokenizer& tokenizer;
  config::Config config;  ///< of prepare_to_generate()
  std::vector<std::string> prompts;
  std::vector<std::string> stops;
  std::int64_t max_tokens, batch;
  models::Sampling sampling;
  /// Null: one prompt, whose text is printed as it comes.
  CompletionsFile* completions = nullptr;
};

/// One rank's part of a request: all ranks take the same tokens, and rank 0 writes, and says what it took.
void generate(const Request& request, const DistributedPtr& dist);

}  // namespace sherd::cli

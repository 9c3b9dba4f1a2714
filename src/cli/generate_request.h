#pragma once

#include <string>
#include <vector>

#include "cli/inference.h"
#include "cli/prompts_file.h"

namespace sherd::cli {

/// What generates, and how.
struct Request {
  const Inference& from;
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

#pragma once

#include <string>
#include <vector>

#include "cli/inference/inference.h"
#include "cli/inference/prompts_file.h"

namespace sherd::cli {

/// A request to generate: the model, the prompts, and how.
struct Request {
  const Inference& from;
  std::vector<std::vector<std::int32_t>> prompts;
  std::vector<std::int32_t> end_ids;  ///< each ends a text, and is not shown
  std::vector<std::string> stops;     ///< each of these texts ends one, too
  std::int64_t max_tokens, batch;
  models::Sampling sampling;
  bool answers = false;   ///< a decoder writes behind an encoder, and does not go on with the prompt's text
  bool echo = true;       ///< print a single prompt before what continues it
  std::string drop = {};  ///< is taken off a text that begins with it
  /// Null: one prompt, whose text is printed as it comes.
  CompletionsFile* completions = nullptr;
};

/// One rank's part of a request: all ranks take the same tokens, and rank 0 writes, and says what it took.
void generate(const Request& request, const DistributedPtr& dist);

/// The same of one prompt and a model that is there; returns what continues it, on every rank.
std::string generate_one(const Request& request, InferenceModel& from, const DistributedPtr& dist);

}  // namespace sherd::cli

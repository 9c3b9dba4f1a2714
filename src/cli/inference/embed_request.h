#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/inference/inference.h"
#include "cli/inference/prompts_file.h"
#include "data/text/labelled_example.h"
#include "models/inference/embed.h"

namespace sherd::cli {

/// The words of a text, and where each begins among its tokens, as in data::EncodedWords.
struct TextWords {
  std::vector<std::string> words;
  std::vector<std::int64_t> first;
};

/// A request for the embeddings of texts, or for their labels.
struct EmbedRequest {
  const Inference& from;
  std::vector<std::vector<std::int32_t>> texts;
  std::vector<TextWords> words;  ///< of each text, where labels are of tokens
  std::int64_t batch;
  std::optional<models::Pooling> pooling;  ///< nothing: labels are asked for
  CompletionsFile& out;
};

/// The ids of a text as the model saw documents: between the tokens that begin and end one where it is an
/// encoder, which takes pairs, too, else as prompt_of(). Of a text that is longer than the model takes, the
/// beginning where it is to be `cut`, as in training of classifiers; else throws Error{data} that names it.
std::vector<std::int32_t> text_to_embed(const Inference& inference, const Prompt& prompt, bool cut);

/// Adds a text whose words are to be labelled: those that the prompt has, or what lies between white space in
/// its text; cut as by text_to_embed().
void add_words(EmbedRequest& request, const Prompt& prompt);

/// One rank's part of a request; rank 0 writes.
void embed(const EmbedRequest& request, const DistributedPtr& dist);

}  // namespace sherd::cli

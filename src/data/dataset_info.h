#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace sherd::data {

/// How people judged a dataset's answers: not at all, in pairs, or each by a label. A document of judged
/// answers is two sequences, each a prompt with an answer: the chosen one, then the rejected one. With labels
/// one of the two has no answer, and is the end-of-document token alone.
enum class Preferences : std::uint8_t { none, pairs, labels };

/// PREFIX.json's account of the dataset PREFIX: how its text was tokenized, and how much there is.
struct DatasetInfo {
  /// The spec for make_tokenizer(); a model beside the dataset is named with its full path.
  std::string tokenizer;
  std::int64_t vocab_size = 0;
  std::int32_t end_of_document = 0;
  std::string token_type;  ///< "uint16" or "int32"
  std::int64_t tokens = 0, sequences = 0, documents = 0;
  std::int64_t text_bytes = 0;  ///< the documents' text, as encoded
  /// Entropy of the token frequencies over the whole dataset, in nats per token: the loss of a model that
  /// knows nothing but these.
  double unigram_entropy = 0;
  std::int64_t masked_tokens = 0;  ///< tokens that are no targets of the loss: PREFIX.mask says which
  std::string chat_template{};     ///< ChatTemplate::spec() of the one that wrote conversations down; empty:
                                   ///< there are none
  std::vector<std::string>
      labels{};                   ///< names of the classes; not empty: the last id of each document is one
  bool seq2seq = false;           ///< prompts and completions are texts of their own, each with its end
  bool labels_of_tokens = false;  ///< labels are of tokens, as read_token_classes() says
  Preferences preferences = Preferences::none;
};

/// Entropy in nats of the distribution that `counts` describes; 0 for no counts.
double unigram_entropy(std::span<const std::int64_t> counts);

/// Writes PREFIX.json whole or not at all. A tokenizer model beside the dataset is named relative to it, so
/// that the files can move together.
void write_dataset_info(const std::string& prefix, const DatasetInfo& info);

/// Reads PREFIX.json; nullopt when there is none (datasets that Megatron wrote). Throws Error{data} for a
/// damaged one, Error{io} for one that cannot be read.
std::optional<DatasetInfo> read_dataset_info(const std::string& prefix);

}  // namespace sherd::data

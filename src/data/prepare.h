#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/dataset_info.h"
#include "data/text/text_source.h"

namespace sherd::data {

enum class PreparePhase { training_tokenizer, encoding };
/// How far prepare() is.
struct PrepareProgress {
  PreparePhase phase = PreparePhase::encoding;
  std::uint64_t bytes_done = 0;   ///< bytes of the input files that this phase is through with
  std::uint64_t bytes_total = 0;  ///< 0 when an input is a pipe
  std::int64_t documents = 0, tokens = 0;
};

struct PrepareOptions {
  /// Text files, .jsonl files, folders of them; pipes, unless a tokenizer is trained.
  std::vector<std::string> inputs = {};
  std::string tokenizer = "byte";  ///< byte | spm:MODEL | hf:PATH | spm-train:VOCAB[:unigram|:bpe]
  std::string output = {};         ///< PREFIX of the files to write; its folder must exist
  DocumentRule document = DocumentRule::blank;  ///< for text files
  /// The key of the text in .jsonl files; empty: messages, prompt and completion, or text, as read_examples()
  /// says.
  std::string json_field = {};
  /// Names of the classes that texts or words have: each line of a .jsonl file is then a text, or a pair of
  /// texts, with a label, as read_labelled() says, or where the first line has a list of words, such a list
  /// with theirs, as read_labelled_words() says. Empty: texts have none.
  std::vector<std::string> labels = {};
  std::string label_field = {}, pair_field = "text_pair";  ///< with labels: as LabelledOptions
  bool seq2seq = false;  ///< prompts and completions are texts of their own (ExampleOptions::apart)
  /// The template of conversations, as chosen_template() takes it; empty: the tokenizer's.
  std::string chat_template = {};
  /// Lines of JSON of bad data are left out, and counted; else the first one throws.
  bool skip_errors = false;
  std::int64_t tokenizer_sample_bytes = std::int64_t{4} << 20;  ///< about how much text spm-train learns from
  int threads = 0;                                              ///< 0: all cores
  /// Called on the calling thread; may throw to stop.
  std::function<void(const PrepareProgress&)> progress = {};
};

struct PrepareReport {
  DatasetInfo info;
  std::int64_t files = 0;
  std::int64_t invalid_bytes = 0;  ///< bytes of the text that are no UTF-8
  /// Conversations were written as plain since nothing said how: neither options, a template nor tokens.
  bool template_by_default = false;
  std::int64_t left_out = 0;  ///< conversations and completions from which nothing is to be learned
  static constexpr std::size_t most_told = 10;
  std::int64_t skipped = 0;                ///< lines that were left out for bad data
  std::vector<std::string> first_skipped;  ///< what was wrong with the first most_told of them, in order
  bool lossless = true;                    ///< invalid bytes were kept (as byte ids), not replaced by U+FFFD
  double training_seconds = 0, encoding_seconds = 0;
};

/// Turns text into an indexed dataset: PREFIX.bin and .idx (Megatron's format), PREFIX.json (DatasetInfo),
/// PREFIX.model where the tokenizer is a SentencePiece model, PREFIX.tokenizer.json where it is one, and
/// PREFIX.mask where some tokens are no targets of the loss (conversations, completions), so that these files
/// are all that training needs. Every document ends with the tokenizer's end-of-document id, and begins with
/// begin_of_document() where it has one; one longer than TextSource::piece_bytes becomes several sequences,
/// but for conversations, completions and texts with labels, whose class is the last id of its document, or
/// whose tokens have classes behind them (read_token_classes()): a word's first token that of the word, its
/// others and the special tokens none.
/// Documents keep their order and the files are the same bytes for any number of threads. Memory is bounded
/// whatever the size of the text. Nothing appears under the final names unless all went well.
///
/// Throws Error{io} for what cannot be read or written, Error{data} for bad content or no text at all,
/// Error{config} for a bad tokenizer spec, Error{usage} for missing options.
PrepareReport prepare(const PrepareOptions& options);

}  // namespace sherd::data

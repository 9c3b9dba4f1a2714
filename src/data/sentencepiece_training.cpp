#include <sentencepiece_trainer.h>

#include <unordered_map>

#include "base/error.h"
#include "data/tokenizer.h"

namespace sherd::data {
namespace {

/// More threads than this would sum expectations in another order and so give another model; fewer would be
/// slow.
constexpr const char* fixed_threads = "8";

class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const LineSource& source) : source_(source) { Next(); }
  bool done() const override { return done_; }
  void Next() override { done_ = !source_(line_); }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const LineSource& source_;
  std::string line_;
  bool done_ = false;
};

/// The library's message is "INTERNAL: file.cc(12) [condition] text"; only the text means something to a
/// user.
std::string reason(const std::string& message) {
  const std::size_t bracket = message.rfind("] ");
  const std::string text = bracket == std::string::npos ? message : message.substr(bracket + 2);
  return text.empty() ? message : text;
}

}  // namespace

std::string train_sentencepiece(const TrainTokenizer& request, const LineSource& lines) {
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", request.bpe ? "bpe" : "unigram"},
      {"vocab_size", std::to_string(request.vocab_size)},
      {"num_threads", fixed_threads},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"character_coverage", "0.9999"},
      {"max_sentence_length", "65536"},
      {"minloglevel", "3"},
      {"control_symbols", request.mask ? "<mask>" : ""},
  };
  Lines iterator(lines);
  if (iterator.done()) fail(ErrorKind::data, "there is no text to train a tokenizer on");
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &iterator, &model);
  if (!status.ok())
    fail(ErrorKind::data, "cannot train a tokenizer with a vocabulary of ", request.vocab_size,
         " on this text: ", reason(status.ToString()),
         " Choose another VOCAB in spm-train:VOCAB, or give more text.");
  return model;
}

}  // namespace sherd::data

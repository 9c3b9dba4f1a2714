#include "data/chosen_tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/indexed_dataset.h"
#include "data/templates/published_template.h"
#include "data/text/example.h"

namespace sherd::data {
namespace {

constexpr std::size_t training_line_bytes = 4096;
constexpr std::size_t report_bytes = std::size_t{8} << 20;  // between two reports

/// Gives a deterministic, even sample of the lines of the inputs, as a SentencePiece trainer wants them: no
/// tabs (it reserves them), valid UTF-8, not too long.
class TrainingLines {
 public:
  TrainingLines(const PrepareOptions& options, const std::vector<InputFile>& files)
      : options_(options),
        source_(files, DocumentRule::line),
        total_(total_bytes(files)),
        budget_(std::max<std::int64_t>(1, options.tokenizer_sample_bytes)) {
    const double share =
        static_cast<double>(budget_) / static_cast<double>(std::max<std::uint64_t>(1, total_));
    threshold_ = share >= 1 ? ~std::uint64_t{0} : static_cast<std::uint64_t>(share * 18446744073709551615.0);
  }

  bool next(std::string& line) {
    while (at_ >= text_.size())
      if (!next_text()) return false;
    std::size_t end = std::min(text_.find_first_of("\n\t", at_), text_.size());
    if (end - at_ > training_line_bytes) {
      const std::size_t space = text_.rfind(' ', at_ + training_line_bytes);
      end = space != std::string::npos && space > at_
                ? space
                : at_ + cut_before(std::string_view(text_).substr(at_), training_line_bytes);
    }
    line.assign(text_, at_, end - at_);
    at_ = end + (end < text_.size() && (text_[end] == '\n' || text_[end] == '\t'));
    if (invalid_utf8_bytes(line) > 0) line.clear();
    return true;  // the trainer skips empty lines
  }

 private:
  bool next_text() {
    TextPiece piece;
    do {
      // The sizes of JSON files only hint at how much text they hold, hence the second bound.
      if (taken_ >= 2 * budget_ || !source_.next(piece)) return false;
      if (source_.bytes_read() >= next_report_) report();
    } while (mix_seed(0, index_++) > threshold_);
    text_ = piece.json ? text_in(piece) : std::move(piece.text);
    at_ = 0;
    taken_ += static_cast<std::int64_t>(text_.size());
    return true;
  }

  std::string text_in(const TextPiece& piece) const {
    const std::filesystem::path& file = source_.files()[piece.file].path;
    try {
      if (const LabelledOptions labelled = labelled_options(options_);
          !labelled.labels.empty() && has_words(piece.text, labelled).value_or(false))
        return joined_text(read_labelled_words(piece.text, labelled, file, piece.line).words, " ");
      std::string text;
      for (const Example& example :
           read_examples(piece.text, {options_.json_field, any_template_}, file, piece.line))
        text += text_of(example);
      return text;
    } catch (const Error& error) {
      if (!options_.skip_errors || error.kind() != ErrorKind::data) throw;
      return {};
    }
  }

  void report() {
    next_report_ = source_.bytes_read() + report_bytes;
    if (!options_.progress) return;
    PrepareProgress progress;
    progress.phase = PreparePhase::training_tokenizer;
    progress.bytes_done = source_.bytes_read(), progress.bytes_total = total_;
    options_.progress(progress);
  }

  const PrepareOptions& options_;
  TextSource source_;
  std::shared_ptr<const Tokenizer> any_tokenizer_ = make_byte_tokenizer();  // there is none yet
  ChatTemplate any_template_ = chosen_template(
      options_.chat_template.empty() ? "chatml" : options_.chat_template,
      [](const std::string&) { return std::string(); }, *any_tokenizer_);
  std::uint64_t total_, threshold_ = 0, index_ = 0, next_report_ = 0;
  std::int64_t budget_, taken_ = 0;
  std::string text_;
  std::size_t at_ = 0;
};

}  // namespace

LabelledOptions labelled_options(const PrepareOptions& options) {
  return {options.json_field, options.label_field, options.pair_field, options.labels};
}

ChosenTokenizer choose_tokenizer(const PrepareOptions& options, const std::vector<InputFile>& files) {
  TrainTokenizer request;
  if (parse_train_spec(options.tokenizer, request)) {
    for (const InputFile& file : files)
      require(file.regular, "'", file.path.string(),
              "' can be read only once, but spm-train reads the text twice; ",
              "give a file, or a trained model as spm:MODEL");
    TrainingLines lines(options, files);
    std::string model = train_sentencepiece(request, [&](std::string& line) { return lines.next(line); });
    auto tokenizer = make_sentencepiece(model, model_path(options.output).string());
    return {std::move(tokenizer), std::move(model)};
  }
  const std::string given = model_file_of(options.tokenizer);
  if (given.empty()) return {make_tokenizer(options.tokenizer), {}};
  std::string model = read_model_file(given);
  const auto theirs = make_tokenizer(options.tokenizer, model);  // errors name the user's file
  const bool hugging_face = kind_of_tokenizer(options.tokenizer) == "hf";
  const std::string stored =
      (hugging_face ? tokenizer_path(options.output) : model_path(options.output)).string();
  auto tokenizer = make_tokenizer(with_model_file(theirs->spec(), stored), model);
  return {std::move(tokenizer), std::move(model)};
}

}  // namespace sherd::data

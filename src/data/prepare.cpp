#include "data/prepare.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "base/arena.h"
#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/chosen_tokenizer.h"
#include "data/dataset_builder.h"
#include "data/templates/published_template.h"
#include "data/text/example.h"
#include "data/text/labelled_example.h"
#include "data/text/segments.h"
#include "data/tokenizer.h"

namespace sherd::data {
namespace {

constexpr std::size_t round_bytes = std::size_t{8} << 20;  // text that is in memory at a time
constexpr std::size_t job_bytes = std::size_t{64} << 10;   // text that one chunk of work encodes

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// True for the files that an earlier run wrote, when the output lies in a folder that is an input.
bool is_output(const std::filesystem::path& path, const std::string& prefix) {
  for (const auto& output : {bin_path(prefix), index_path(prefix), info_path(prefix), mask_path(prefix),
                             model_path(prefix), tokenizer_path(prefix)}) {
    std::error_code ignored;
    if (std::filesystem::equivalent(path, output, ignored)) return true;
  }
  return false;
}

/// A file beside the tokenizer's; empty: none.
std::string beside_tokenizer(const PrepareOptions& options, const char* name) {
  const std::string file = model_file_of(options.tokenizer);
  const auto path = std::filesystem::path(file).parent_path() / name;
  std::error_code none;
  return !file.empty() && std::filesystem::exists(path, none) ? read_file(path) : std::string();
}

/// Files beside the tokenizer's; of one that is trained, none.
FilesBeside files_of(const PrepareOptions& options) {
  TrainTokenizer trained;
  if (parse_train_spec(options.tokenizer, trained)) return [](const std::string&) { return std::string(); };
  return [&options](const std::string& name) { return beside_tokenizer(options, name.c_str()); };
}

/// Conversations are written as was asked for, else as the template beside the tokenizer writes them, else as
/// the tokenizer's tokens tell.
ExampleOptions example_options(const PrepareOptions& options, const Tokenizer& tokenizer) {
  ExampleOptions out{options.json_field, {}};
  out.apart = options.seq2seq;
  if (!options.chat_template.empty()) {
    out.chat_template = chosen_template(options.chat_template, files_of(options), tokenizer);
    return out;
  }
  try {
    out.chat_template = published_template(files_of(options), tokenizer, "the tokenizer");
    if (!out.chat_template) out.chat_template = ChatTemplate::by_tokens(tokenizer);
  } catch (const Error& error) {
    out.no_template = error.what();  // texts may be prepared all the same
  }
  return out;
}

/// Counts and facts of the lines of a job.
struct JobCounts {
  std::int64_t text_bytes = 0, invalid_bytes = 0, left_out = 0;
  bool conversations = false;
  std::optional<Preferences> kind;
  std::string kind_at;  ///< the line that told it, "FILE:LINE"
};

/// Some pieces of text, and what became of them. Encoded by one thread.
struct Job : JobCounts {
  std::vector<TextPiece> pieces;
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> learned;                    // a mark per token
  std::vector<std::pair<std::size_t, bool>> sequences;  // length, ends its document
  std::vector<std::string> skipped;                     // what was wrong with lines
};

class Preparation {
 public:
  Preparation(const PrepareOptions& options, const Tokenizer& tokenizer, std::vector<InputFile> files)
      : options_(options),
        tokenizer_(tokenizer),
        example_options_(example_options(options, tokenizer)),
        source_(std::move(files), options.document),
        total_(total_bytes(source_.files())),
        arena_(options.threads > 0 ? options.threads : available_cores()),
        builder_(options.output, tokenizer.vocab_size()),
        token_counts_(static_cast<std::size_t>(tokenizer.vocab_size())) {}

  void run() {
    while (read_round()) {
      if (!of_words_ && !options_.labels.empty()) of_words_ = first_has_words();
      arena_.parallel_for(static_cast<std::int64_t>(used_), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) encode(jobs_[static_cast<std::size_t>(i)]);
      });
      for (std::size_t i = 0; i < used_; ++i) store(jobs_[i]);
      report();
    }
    if (builder_.counts().documents == 0 && skipped_ > 0)
      fail(ErrorKind::data, "nothing is left: ", counted(skipped_, "line"), skipped_ == 1 ? " was" : " were",
           " skipped, the first for: ", first_skipped_.front(), "; nothing was written");
    if (builder_.counts().documents == 0 && left_out_ > 0)
      fail(ErrorKind::data, "none of ", counted(left_out_, "example"),
           " has an answer to learn from (a message of the assistant's, or a completion); nothing was "
           "written");
    if (options_.seq2seq && builder_.counts().masked == 0)
      fail(ErrorKind::config,
           "--seq2seq is for lines with a prompt and a completion, of which there are none: leave "
           "it out; nothing was written");
    if (builder_.counts().documents == 0)
      fail(ErrorKind::data, "the ", source_.files().size() == 1 ? "input holds" : "inputs hold",
           " no text (first: '", source_.files().front().path.string(), "'); nothing was written");
  }

  DatasetInfo finish(const std::string& model) {
    DatasetInfo info;
    builder_.finish([&] {
      const DatasetCounts& so_far = builder_.counts();
      info = {tokenizer_.spec(),
              tokenizer_.vocab_size(),
              tokenizer_.end_of_document(),
              std::string(name_of(token_type_for(tokenizer_.vocab_size()))),
              so_far.tokens,
              so_far.sequences,
              so_far.documents,
              text_bytes_,
              unigram_entropy(token_counts_),
              so_far.masked,
              conversations_ ? example_options_.chat_template->spec() : "",
              options_.labels,
              options_.seq2seq,
              of_words_.value_or(false),
              kind_.value_or(Preferences::none)};
      if (!model.empty()) write_file_atomically(model_file_of(tokenizer_.spec()), model);
      write_dataset_info(options_.output, info);
    });
    return info;
  }

  std::int64_t invalid_bytes() const { return invalid_bytes_; }
  std::int64_t left_out() const { return left_out_; }
  std::int64_t skipped() const { return skipped_; }
  const std::vector<std::string>& first_skipped() const { return first_skipped_; }

 private:
  /// The first line that can be read tells of all; nothing: none can.
  std::optional<bool> first_has_words() const {
    for (std::size_t i = 0; i < used_; ++i)
      for (const TextPiece& piece : jobs_[i].pieces)
        if (const auto has = piece.json ? has_words(piece.text, labelled_options(options_)) : false)
          return has;
    return {};
  }

  /// Fills jobs_ with the next text. False at the end.
  bool read_round() {
    used_ = 0;
    std::size_t bytes = 0, job = job_bytes;
    TextPiece piece;
    while (bytes < round_bytes && source_.next(piece)) {
      if (job >= job_bytes) {
        if (used_ == jobs_.size()) jobs_.emplace_back();
        ++used_, job = 0;
      }
      job += piece.text.size(), bytes += piece.text.size();
      jobs_[used_ - 1].pieces.push_back(std::move(piece));
    }
    return used_ > 0;
  }

  void encode(Job& job) const {
    job.tokens.clear(), job.learned.clear(), job.sequences.clear();
    static_cast<JobCounts&>(job) = {};
    job.skipped.clear();
    for (const TextPiece& piece : job.pieces)
      if (piece.json)
        encode_or_skip(job, piece);
      else if (!options_.labels.empty())
        fail(ErrorKind::data, "'", source_.files()[piece.file].path.string(),
             "' is text, which has no labels: --labels reads .jsonl files");
      else
        encode_text(job, piece.text, piece.first, piece.last);
    job.pieces.clear();
  }

  void encode_text(Job& job, const std::string& text, bool first, bool last) const {
    const std::size_t before = job.tokens.size();
    if (const auto begin = tokenizer_.begin_of_document(); begin && first) job.tokens.push_back(*begin);
    using Behind = EncodeOptions::Behind;
    tokenizer_.encode(text, {.behind = first ? Behind::nothing : Behind::text}, job.tokens);
    if (last) job.tokens.push_back(tokenizer_.end_of_document());
    job.learned.resize(job.tokens.size(), 1);
    close(job, before, text, last);
  }

  /// [begin] text [end], and of a pair the other text and an end; then the class.
  void encode_labelled(Job& job, const TextPiece& piece) const {
    const LabelledExample example =
        read_labelled(piece.text, labelled_options(options_), source_.files()[piece.file].path, piece.line);
    const std::size_t before = job.tokens.size();
    const std::vector<std::int32_t> ids = encode_parts(tokenizer_, example.text, example.pair);
    job.tokens.insert(job.tokens.end(), ids.begin(), ids.end());
    job.learned.resize(job.tokens.size(), 0);
    job.tokens.push_back(example.label), job.learned.push_back(1);
    close(job, before, example.text + example.pair.value_or(""), true);
  }

  /// [begin] words [end]; then the class of each token.
  void encode_labelled_words(Job& job, const TextPiece& piece) const {
    const LabelledWords example = read_labelled_words(piece.text, labelled_options(options_),
                                                      source_.files()[piece.file].path, piece.line);
    const EncodedWords encoded = encode_words(tokenizer_, example.words);
    const std::size_t before = job.tokens.size(), tokens = encoded.ids.size();
    job.tokens.insert(job.tokens.end(), encoded.ids.begin(), encoded.ids.end());
    job.learned.resize(job.tokens.size(), 0);
    job.tokens.resize(before + 2 * tokens, 0), job.learned.resize(before + 2 * tokens, 1);
    for (std::size_t i = 0; i < example.words.size(); ++i)
      if (encoded.first[i] >= 0)
        job.tokens[before + tokens + static_cast<std::size_t>(encoded.first[i])] = example.labels[i] + 1;
    close(job, before, joined_text(example.words, " "), true);
  }

  /// A line of bad data leaves nothing behind but what was wrong with it.
  void encode_or_skip(Job& job, const TextPiece& piece) const {
    const std::size_t tokens = job.tokens.size(), sequences = job.sequences.size();
    const JobCounts counts = job;
    try {
      encode_line(job, piece);
    } catch (const Error& error) {
      if (!options_.skip_errors || error.kind() != ErrorKind::data) throw;
      job.tokens.resize(tokens), job.learned.resize(tokens), job.sequences.resize(sequences);
      static_cast<JobCounts&>(job) = counts;
      job.skipped.emplace_back(error.what());
    }
  }

  void encode_line(Job& job, const TextPiece& piece) const {
    if (of_words_.value_or(false)) return encode_labelled_words(job, piece);
    if (!options_.labels.empty()) return encode_labelled(job, piece);
    const std::vector<Example> examples =
        read_examples(piece.text, example_options_, source_.files()[piece.file].path, piece.line);
    note_kind(job, piece,
              examples.front().side == Side::none ? Preferences::none
              : examples.size() == 1              ? Preferences::labels
                                                  : Preferences::pairs);
    for (std::size_t i = 0; i < examples.size(); ++i) {
      const Side side = examples[i].side;
      if (side == Side::none)
        encode_example(job, piece, examples[i], true);
      else if (examples.size() == 1)
        encode_pair(job, piece, side == Side::chosen ? &examples[i] : nullptr,
                    side == Side::rejected ? &examples[i] : nullptr);
      else if (side == Side::chosen)
        encode_pair(job, piece, &examples[i], &examples[i + 1]);
    }
  }

  /// A chosen text and a rejected one, which are sequences of one document. One that is not there is the end
  /// of a document.
  void encode_pair(Job& job, const TextPiece& piece, const Example* chosen, const Example* rejected) const {
    for (const Example* each : {chosen, rejected})
      if (each && !each->teaches()) return void(++job.left_out);
    for (const auto& [each, last] : {std::pair(chosen, false), std::pair(rejected, true)}) {
      if (each) {
        encode_example(job, piece, *each, last);
        continue;
      }
      job.tokens.push_back(tokenizer_.end_of_document()), job.learned.push_back(0);
      close(job, job.tokens.size() - 1, "", last);
    }
  }

  void encode_example(Job& job, const TextPiece& piece, const Example& example, bool last) const {
    const std::string text = text_of(example);
    if (!example.marked) return text.empty() ? void() : encode_text(job, text, true, true);
    if (!example.teaches()) return void(++job.left_out);
    const std::size_t before = job.tokens.size();
    try {
      encode_segments(tokenizer_, example.segments,
                      example.conversation ? SpelledTokens::text : SpelledTokens::tokens, job.tokens,
                      job.learned);
    } catch (const Error& error) {
      fail(error.kind(), "'", source_.files()[piece.file].path.string(), "', line ", piece.line, ", ",
           error.what());
    }
    if (const auto begin = tokenizer_.begin_of_document();
        begin && !example.conversation && (job.tokens.size() == before || job.tokens[before] != *begin)) {
      job.tokens.insert(job.tokens.begin() + static_cast<std::ptrdiff_t>(before), *begin);
      job.learned.insert(job.learned.begin() + static_cast<std::ptrdiff_t>(before), 0);
    }
    if (!ends(example)) {
      job.tokens.push_back(tokenizer_.end_of_document());
      job.learned.push_back(0);
    }
    job.conversations = job.conversations || example.conversation;
    close(job, before, text, last);
  }

  /// Lines of one dataset are all of one kind.
  void note_kind(Job& job, const TextPiece& piece, Preferences kind) const {
    const std::string at = cat(source_.files()[piece.file].path, ":", piece.line);
    if (!job.kind) job.kind = kind, job.kind_at = at;
    require_kind(*job.kind, kind, at);
    if (kind != Preferences::none && options_.seq2seq)
      fail(ErrorKind::config,
           "--seq2seq is for lines with a prompt and a completion, and preferences are learned by decoders: "
           "leave it out");
  }
  static void require_kind(Preferences first, Preferences other, const std::string& at) {
    if (first == other) return;
    const auto shown = [](Preferences kind) {
      return kind == Preferences::none    ? "texts to be learned"
             : kind == Preferences::pairs ? "pairs of 'chosen' and 'rejected', or ranked answers"
                                          : "answers with a 'label'";
    };
    fail(ErrorKind::config, "the lines before ", at, " are ", shown(first), ", and this one is ",
         shown(other), ": prepare each kind by itself");
  }

  /// Whether the last that is no space is the end of the document.
  bool ends(const Example& example) const {
    for (auto at = example.segments.rbegin(); at != example.segments.rend(); ++at) {
      if (at->kind == SegmentKind::end) return true;
      if (at->kind == SegmentKind::control)
        return tokenizer_.token_id(at->text) == tokenizer_.end_of_document();
      if (at->text.find_first_not_of(" \n") != std::string::npos) return false;
    }
    return false;
  }

  static void close(Job& job, std::size_t before, const std::string& text, bool last) {
    job.sequences.emplace_back(job.tokens.size() - before, last);
    job.text_bytes += static_cast<std::int64_t>(text.size());
    job.invalid_bytes += static_cast<std::int64_t>(invalid_utf8_bytes(text));
  }

  void store(const Job& job) {
    std::span<const std::int32_t> rest = job.tokens;
    std::span<const std::uint8_t> marks = job.learned;
    for (const auto& [length, last] : job.sequences) {
      builder_.add(rest.first(length), last, marks.first(length));
      rest = rest.subspan(length), marks = marks.subspan(length);
    }
    // Labels are no tokens of the text.
    for (std::size_t i = 0; i < job.tokens.size(); ++i)
      if (options_.labels.empty() || job.learned[i] == 0)
        ++token_counts_[static_cast<std::size_t>(job.tokens[i])];
    text_bytes_ += job.text_bytes, invalid_bytes_ += job.invalid_bytes, left_out_ += job.left_out;
    conversations_ = conversations_ || job.conversations;
    if (job.kind && !kind_) kind_ = job.kind;
    if (job.kind) require_kind(*kind_, *job.kind, job.kind_at);
    skipped_ += static_cast<std::int64_t>(job.skipped.size());
    for (const std::string& error : job.skipped)
      if (first_skipped_.size() < PrepareReport::most_told) first_skipped_.push_back(error);
  }

  void report() const {
    if (!options_.progress) return;
    const DatasetCounts& counts = builder_.counts();
    options_.progress(
        {PreparePhase::encoding, source_.bytes_read(), total_, counts.documents, counts.tokens});
  }

  const PrepareOptions& options_;
  const Tokenizer& tokenizer_;
  const ExampleOptions example_options_;
  TextSource source_;
  std::uint64_t total_;
  Arena arena_;
  DatasetBuilder builder_;
  std::vector<std::int64_t> token_counts_;
  std::vector<Job> jobs_;
  std::size_t used_ = 0;  // so many of jobs_ are filled this round
  std::int64_t text_bytes_ = 0, invalid_bytes_ = 0, left_out_ = 0, skipped_ = 0;
  std::vector<std::string> first_skipped_;
  bool conversations_ = false;
  std::optional<Preferences> kind_;
  std::optional<bool> of_words_;  // with labels: lines have words with theirs
};

}  // namespace

PrepareReport prepare(const PrepareOptions& options) {
  require(!options.output.empty(), "no output prefix; give one such as data/corpus");
  check_output_prefix(options.output);
  PrepareReport report;
  require(options.labels.size() != 1,
          "--labels names one class; give all that there are, separated by commas");
  std::vector<InputFile> files = find_inputs(options.inputs);
  std::erase_if(files, [&](const InputFile& file) { return is_output(file.path, options.output); });
  if (files.empty())
    fail(ErrorKind::io, "the only inputs are the files of the dataset '", options.output, "' itself");
  TextSource::check(files);
  report.files = static_cast<std::int64_t>(files.size());
  const auto start = Clock::now();
  const ChosenTokenizer chosen = choose_tokenizer(options, files);
  report.training_seconds = seconds_since(start);

  const auto encoding = Clock::now();
  Preparation preparation(options, *chosen.tokenizer, files);
  preparation.run();
  report.info = preparation.finish(chosen.model);
  report.encoding_seconds = seconds_since(encoding);
  report.invalid_bytes = preparation.invalid_bytes();
  report.left_out = preparation.left_out();
  report.skipped = preparation.skipped(), report.first_skipped = preparation.first_skipped();
  report.template_by_default = report.info.chat_template == "plain" && options.chat_template.empty() &&
                               kind_of_tokenizer(options.tokenizer) == "hf";
  report.lossless = chosen.tokenizer->lossless();
  return report;
}

}  // namespace sherd::data

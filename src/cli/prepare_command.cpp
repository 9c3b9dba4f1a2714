#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "data/indexed_dataset.h"
#include "data/prepare.h"
#include "data/templates/chat_template.h"
#include "engine/report/progress.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

using data::PreparePhase;
using data::PrepareProgress;
using engine::human_bytes;
using engine::human_count;

engine::WorkState work_of(const PrepareProgress& progress) {
  const bool training = progress.phase == PreparePhase::training_tokenizer;
  const auto tokens = static_cast<double>(progress.tokens);
  return {.title = training ? "reading text for the tokenizer" : "encoding",
          .done = static_cast<double>(progress.bytes_done),
          .total = static_cast<double>(progress.bytes_total),
          .more = tokens > 0 ? human_count(tokens) + " tokens" : ""};
}

double seconds_of(const data::PrepareReport& report) {
  return report.training_seconds + report.encoding_seconds;
}

/// Ids to be learned are no tokens of texts that have labels.
std::int64_t tokens_of(const data::DatasetInfo& info) {
  return info.labels.empty() ? info.tokens : info.masked_tokens;
}

nlohmann::ordered_json json_of(const data::PrepareReport& report, const std::string& prefix) {
  const data::DatasetInfo& info = report.info;
  nlohmann::ordered_json out{{"dataset", prefix},
                             {"tokens", tokens_of(info)},
                             {"documents", info.documents},
                             {"text_bytes", info.text_bytes},
                             {"seconds", seconds_of(report)},
                             {"tokenizer", info.tokenizer},
                             {"vocab_size", info.vocab_size},
                             {"token_type", info.token_type},
                             {"unigram_entropy", info.unigram_entropy},
                             {"skipped_lines", report.skipped},
                             {"left_out", report.left_out},
                             {"invalid_bytes", report.invalid_bytes}};
  if (!info.labels.empty()) out["labels"] = info.labels;
  if (info.labels.empty() && info.masked_tokens > 0) out["learned_tokens"] = info.tokens - info.masked_tokens;
  if (!info.chat_template.empty()) out["chat_template"] = data::name_of_spec(info.chat_template);
  return out;
}

void print_report(const data::PrepareReport& report, const std::string& prefix) {
  const data::DatasetInfo& info = report.info;
  const std::int64_t tokens = tokens_of(info);
  const auto per_token = static_cast<double>(info.text_bytes) / static_cast<double>(tokens);
  std::printf("%s: %s in %s from %s of text in %s\n", prefix.c_str(), counted(tokens, "token").c_str(),
              counted(info.documents, "document").c_str(),
              human_bytes(static_cast<std::uint64_t>(info.text_bytes)).c_str(),
              engine::human_seconds(seconds_of(report)).c_str());
  std::printf("tokenizer %s: vocabulary %lld, %.2f bytes per token, stored as %s\n", info.tokenizer.c_str(),
              static_cast<long long>(info.vocab_size), per_token, info.token_type.c_str());
  std::printf("unigram entropy %.4f nats per token\n", info.unigram_entropy);
  if (!info.labels.empty())
    std::printf("%s%s with one of %zu labels each\n", info.labels_of_tokens ? "words of " : "",
                counted(info.documents, "text").c_str(), info.labels.size());
  if (info.masked_tokens > 0 && info.labels.empty())
    std::printf(
        "%s to be learned (%.1f %%)%s\n", counted((info.tokens - info.masked_tokens), "token").c_str(),
        100 * static_cast<double>((info.tokens - info.masked_tokens)) / static_cast<double>(info.tokens),
        info.chat_template.empty()
            ? ""
            : cat("; conversations written by ", data::name_of_spec(info.chat_template)).c_str());
}

void warn_of(const data::PrepareReport& report) {
  if (report.template_by_default)
    log_warning(
        "neither the tokenizer's tokens nor a template beside it say how conversations are written; they "
        "were "
        "written as plain (--chat-template NAME: as another)");
  if (report.skipped > 0) {
    log_warning(counted(report.skipped, "line"), " of bad data skipped");
    for (const std::string& error : report.first_skipped) std::fprintf(stderr, "  %s\n", error.c_str());
    if (report.skipped > std::ssize(report.first_skipped)) std::fprintf(stderr, "  ...\n");
  }
  if (report.left_out > 0)
    log_warning(counted(report.left_out, "example"), " without an answer to learn from left out");
  if (report.invalid_bytes > 0)
    log_warning(report.invalid_bytes, " bytes of the text are no UTF-8; they were ",
                report.lossless ? "kept" : "replaced by U+FFFD");
}

/// Names between commas.
std::vector<std::string> names_in(const std::string& list) {
  std::vector<std::string> out;
  for (std::size_t at = 0, end = 0; !list.empty() && at <= list.size(); at = end + 1) {
    end = std::min(list.find(',', at), list.size());
    out.push_back(list.substr(at, end - at));
    if (out.back().empty() || std::count(out.begin(), out.end(), out.back()) > 1)
      throw UsageError(cat("--labels '", list, "' has an empty name, or one twice"));
  }
  return out;
}

}  // namespace

CommandLine prepare_line() {
  CommandLine line("prepare", "Turns text into a dataset of token ids (Megatron's indexed format).",
                   "--input F... --tokenizer byte|spm:MODEL|hf:PATH|spm-train:VOCAB --output PREFIX");
  line.list("input", "F",
            "text file, .jsonl file, or folder of them, also packed by gzip or zstd; may be repeated")
      .value("tokenizer", "byte|spm:MODEL|hf:PATH|spm-train:VOCAB",
             "spm: a SentencePiece model; hf: a tokenizer.json or its folder; spm-train: one that is trained "
             "on the text, VOCAB[:unigram|:bpe][:mask]",
             "byte")
      .value("output", "PREFIX",
             "writes PREFIX.bin, .idx, .json; of a tokenizer .model or .tokenizer.json; of answers to learn "
             ".mask")
      .value("document", "blank|line|file", "where a text file's documents end", "blank")
      .value("json-field", "NAME",
             "the text's key in .jsonl files; not given: a conversation's keys, prompt and completion, or "
             "text; of words "
             "with "
             "labels tokens")
      .value("chat-template", "chatml|llama3|mistral|plain|FILE",
             "how messages are written; FILE: a template; not "
             "given: as the template beside the "
             "tokenizer does, else as its tokens tell")
      .value("on-error", "stop|skip",
             "what a line of bad data does: an error, or it is counted, and the first ten told", "stop")
      .flag("seq2seq",
            "prompts and completions are texts of their own, which an encoder reads and a decoder writes; "
            "else a completion goes on with its prompt")
      .value("labels", "A,B,...",
             "names of the classes of texts or words: each line of a .jsonl file has a text, or two, and a "
             "label (its name, or its number among these), or lists of words and of their labels")
      .value("label-field", "NAME", "of --labels: the label's key; not given: label, of words labels")
      .value("pair-field", "NAME", "of --labels: the key of a second text, where a line has one", "text_pair")
      .value("threads", "N", "0: all cores", "0")
      .json()
      .rest_to("input");
  return line;
}

void prepare_command(const CommandLine& line) {
  data::PrepareOptions options;
  options.inputs = line.all("input");
  if (options.inputs.empty()) throw UsageError("--input is missing. See 'sherd prepare --help'");
  options.tokenizer = line.text("tokenizer");
  options.output = line.required("output");
  options.document = data::parse_document_rule(line.text("document"));
  options.json_field = line.text("json-field");
  options.chat_template = line.text("chat-template");
  options.labels = names_in(line.text("labels"));
  options.seq2seq = line.has("seq2seq");
  if (const std::string rule = line.text("on-error"); rule == "skip")
    options.skip_errors = true;
  else if (rule != "stop")
    throw UsageError(cat("--on-error is skip or stop, not '", excerpt(rule), "'"));
  for (const char* name : {"document", "chat-template", "seq2seq"})
    if (line.has(name) && !options.labels.empty())
      throw UsageError(cat("--", name, " does not go with --labels"));
  for (const char* name : {"label-field", "pair-field"})
    if (line.has(name) && options.labels.empty())
      throw UsageError(cat("--", name, " goes with --labels A,B,..."));
  options.label_field = line.text("label-field"), options.pair_field = line.text("pair-field");
  options.threads = static_cast<int>(line.integer("threads", 0));
  engine::WorkBar bar(STDERR_FILENO);
  options.progress = [&](const PrepareProgress& progress) { bar.show(work_of(progress)); };
  const data::PrepareReport report = data::prepare(options);
  bar.clear();
  if (line.has("json"))
    print_json(json_of(report, options.output));
  else
    print_report(report, options.output);
  warn_of(report);
}

}  // namespace sherd::cli

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/inference/classification.h"
#include "cli/inference/evaluation.h"
#include "cli/inference/inference.h"
#include "cli/inference/preference_report.h"
#include "cli/program.h"
#include "comm/communicator.h"
#include "data/dataset_info.h"
#include "data/indexed_dataset.h"
#include "engine/report/progress.h"

namespace sherd::cli {
namespace {

/// Examples are encoded, scored and written together, so many at a time; a run that is cut short has written
/// those before.
constexpr std::size_t round_size = 1024;

/// Examples and documents of an evaluation, by number.
struct Questions {
  std::vector<TaskExample> examples;
  std::shared_ptr<const data::IndexedDataset> dataset;  ///< its documents, in place of examples
  std::size_t limit = 0;                                ///< no more than these; 0: all
  bool preferences = false;                             ///< answers that people compared or judged

  std::size_t size() const {
    const std::size_t all = dataset ? static_cast<std::size_t>(dataset->documents()) : examples.size();
    return limit > 0 ? std::min(limit, all) : all;
  }
};

/// The windows of one document, behind the end of another unless its first token is no target, as in
/// conversations, or stands in front of all documents; tokens that are no targets do not count.
std::vector<models::ScoreRequest> document_windows(const data::IndexedDataset& dataset, std::int64_t document,
                                                   const data::Tokenizer& tokenizer, std::int64_t max_seq) {
  std::vector<std::int32_t> tokens{tokenizer.end_of_document()};
  std::vector<bool> counted;
  for (std::int64_t s = dataset.document_begin(document); s < dataset.document_begin(document + 1); ++s) {
    const auto length = static_cast<std::size_t>(dataset.length(s)), at = tokens.size();
    tokens.resize(at + length);
    const std::span<std::int32_t> read(tokens.data() + at, length);
    dataset.read(s, 0, read);
    dataset.check_ids(read, s, 0, tokenizer.vocab_size());
    if (!dataset.has_mask()) continue;
    std::vector<std::uint8_t> mask(length);
    dataset.read_mask(s, 0, mask);
    counted.insert(counted.end(), mask.begin(), mask.end());
  }
  if (tokens.size() > 1 &&
      (tokens[1] == tokenizer.begin_of_document() || (!counted.empty() && !counted.front()))) {
    tokens.erase(tokens.begin());
    if (!counted.empty()) counted.erase(counted.begin());
  }
  if (tokens.size() < 2) return {};
  std::vector<models::ScoreRequest> windows = models::score_windows(tokens, 1, max_seq, counted);
  std::erase_if(windows, [](const models::ScoreRequest& window) {
    return !window.counted.empty() &&
           std::find(window.counted.begin(), window.counted.end(), true) == window.counted.end();
  });
  return windows;
}

/// Tokens mean the same to the model, as far as the dataset's description tells.
void require_same_tokenizer(const data::IndexedDataset& dataset, const data::Tokenizer& tokenizer) {
  const auto info = data::read_dataset_info(dataset.prefix());
  if (!info || info->tokenizer.empty() || dataset.sequences() == 0) return;
  std::vector<std::int32_t> some(static_cast<std::size_t>(std::min(1000, dataset.length(0))));
  dataset.read(0, 0, some);
  if (info->vocab_size == tokenizer.vocab_size() &&
      data::make_tokenizer(info->tokenizer)->decode(some) == tokenizer.decode(some))
    return;
  fail(ErrorKind::data, dataset.prefix(), " is tokens of ", info->tokenizer, ", and the model's are of ",
       tokenizer.spec(), ": prepare the text with that one");
}

/// A decoder behind an encoder answers; a text alone it does not go on with.
void require_answers(const Questions& questions) {
  if (questions.dataset)
    fail(ErrorKind::config,
         "the model has an encoder (model.encoder), which reads no dataset here: `sherd train` tells the "
         "loss of "
         "its validation split; give --tasks with a context and choices or a completion");
  for (const TaskExample& example : questions.examples)
    if (example.is_text)
      fail(
          ErrorKind::config, "line ", example.line,
          " is a text alone, and the model has an encoder (model.encoder), which reads a context, before the "
          "decoder answers: give a context and choices or a completion");
}

/// Scores questions on one rank; rank 0 judges and tells.
class Evaluation {
 public:
  Evaluation(const Inference& from, const Questions& questions, std::int64_t most_rows, std::ostream* details)
      : from_(from), questions_(questions), most_rows_(most_rows), details_(details) {}

  /// Collective.
  void run(const DistributedPtr& dist) {
    InferenceModel model(from_.reader(), from_.config(), dist);
    const std::int64_t max_text = model.model().config().max_text();
    for (std::size_t begin = 0; begin < questions_.size(); begin += round_size) {
      const std::size_t end = std::min(questions_.size(), begin + round_size);
      std::vector<models::ScoreRequest> windows;
      std::vector<std::size_t> of;  // the continuation to which each belongs, in order
      std::size_t continuations = 0;
      for (std::size_t i = begin; i < end; ++i) ask(i, max_text, windows, of, continuations);
      std::function<void(std::size_t)> told;
      if (dist->rank() == 0)
        told = [&](std::size_t through) { show_bar(begin + (end - begin) * through / windows.size()); };
      const std::vector<models::Score> scores =
          models::score_texts(model.model(), model.run(), windows, most_rows_, model.share(), told,
                              models::SharedContexts::read_once);
      gather(*dist, scores, of, continuations, model.leads());
      if (dist->rank() == 0) judge_round(begin, end);
    }
  }

  const std::map<std::string, TaskMetrics>& tasks() const { return tasks_; }

 private:
  void ask(std::size_t question, std::int64_t max_text, std::vector<models::ScoreRequest>& windows,
           std::vector<std::size_t>& of, std::size_t& continuations) const {
    const auto add = [&](std::vector<models::ScoreRequest> more) {
      for (const models::ScoreRequest& window : more)
        require_rows(window.tokens, from_.tokenizer(), from_.config().model->vocab_size,
                     questions_.dataset ? cat("document ", question)
                                        : cat("line ", questions_.examples[question].line));
      of.insert(of.end(), more.size(), continuations++);
      std::move(more.begin(), more.end(), std::back_inserter(windows));
    };
    if (questions_.dataset)
      return add(document_windows(*questions_.dataset, static_cast<std::int64_t>(question), from_.tokenizer(),
                                  max_text));
    const TaskExample& example = questions_.examples[question];
    for (const std::string& continuation : example.continuations)
      if (const config::Model& model = *from_.config().model; model.has_encoder())
        add({answer_to(from_.tokenizer(), example.context, continuation, model, cat("line ", example.line))});
      else
        add(example.is_text ? text_windows(from_.tokenizer(), continuation, max_text)
                            : windows_of(from_.tokenizer(), example.context, continuation, max_text));
  }

  /// Takes what ranks found, whose threads share this object. When it returns on rank 0, all have given
  /// theirs.
  void gather(const Distributed& dist, const std::vector<models::Score>& scores,
              const std::vector<std::size_t>& of, std::size_t continuations, bool leads) {
    if (dist.rank() == 0) windows_.assign(scores.size(), {});
    dist.world().barrier({.label = "evaluation: a round begins"});
    for (std::size_t i = 0; leads && i < scores.size(); ++i)
      if (scores[i].tokens > 0) windows_[i] = scores[i];
    dist.world().barrier({.label = "evaluation: scores of a round"});
    if (dist.rank() != 0) return;
    found_.assign(continuations, {});
    for (std::size_t i = 0; i < windows_.size(); ++i) {  // in one order for any number of ranks
      found_[of[i]].log_likelihood += windows_[i].log_likelihood;
      found_[of[i]].tokens += windows_[i].tokens;
      found_[of[i]].greedy = found_[of[i]].greedy && windows_[i].greedy;
    }
  }

  void judge_round(std::size_t begin, std::size_t end) {
    auto next = found_.begin();
    for (std::size_t i = begin; i < end; ++i) {
      if (questions_.dataset) {
        tasks_[questions_.dataset->prefix()].add_document(*next++);
        continue;
      }
      const TaskExample& example = questions_.examples[i];
      const auto last = next + std::ssize(example.continuations);
      const Verdict verdict = judge(example, {next, last});
      next = last;
      tasks_[example.task].add(example, verdict);
      if (details_) write(example, verdict);
    }
    show_progress(end);
  }

  void write(const TaskExample& example, const Verdict& verdict) {
    nlohmann::ordered_json line{{"line", example.line}, {"task", example.task}};
    for (const models::Score& score : verdict.scores) {
      line["log_likelihoods"].push_back(score.log_likelihood);
      line["tokens"].push_back(score.tokens);
      line["greedy"].push_back(score.greedy);
    }
    if (example.answer) {
      line["answer"] = *example.answer;
      line["choice"] = verdict.choice;
      line["choice_norm"] = verdict.choice_by_length;
    }
    *details_ << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n' << std::flush;
    if (!*details_) fail(ErrorKind::io, "writing the --output file failed: is the disk full?");
  }

  const char* unit() const { return questions_.dataset ? "documents" : "examples"; }

  void show_bar(std::size_t done) {
    bar_.show({.title = "evaluating",
               .done = static_cast<double>(done),
               .total = static_cast<double>(questions_.size()),
               .unit = unit()});
  }

  void show_progress(std::size_t done) {
    constexpr std::chrono::seconds apart{10};
    const auto now = std::chrono::steady_clock::now();
    const bool whole = done == questions_.size();
    if (!whole && (is_terminal(STDERR_FILENO) || now - told_ < apart)) return;  // which has the bar
    told_ = now;
    if (whole) bar_.clear();
    log_info("evaluated ", done, " of ", questions_.size(), ' ', unit());
  }

  const Inference& from_;
  const Questions& questions_;
  std::int64_t most_rows_;
  std::ostream* details_;                     ///< null: not asked for
  std::vector<models::Score> windows_;        ///< a round's windows; each rank's own between the barriers
  std::vector<models::Score> found_;          ///< scores of the round's continuations; rank 0's
  std::map<std::string, TaskMetrics> tasks_;  ///< rank 0's
  std::chrono::steady_clock::time_point told_ = std::chrono::steady_clock::now();
  engine::WorkBar bar_{STDERR_FILENO};  ///< rank 0's
};

Questions questions_of(const CommandLine& line) {
  if (line.has("tasks") == line.has("data"))
    throw UsageError(line.has("tasks") ? "give --tasks or --data, not both"
                                       : "give --tasks FILE or --data PREFIX: what is to be scored");
  Questions out;
  out.limit = static_cast<std::size_t>(line.integer("limit", 0));
  if (line.has("data")) {
    out.dataset = data::IndexedDataset::open(line.text("data"));
    const auto info = data::read_dataset_info(out.dataset->prefix());
    out.preferences = info && info->preferences != data::Preferences::none;
    if (line.has("output") && !out.preferences)
      throw UsageError("--output goes with --tasks FILE, or with --data of answers that people compared");
  } else {
    out.examples = read_examples(line.text("tasks"));
  }
  return out;
}

std::string table_of(const std::map<std::string, TaskMetrics>& tasks) {
  std::size_t width = 4;
  for (const auto& [name, task] : tasks) width = std::max(width, name.size());
  char text[160];
  std::string out =
      cat("task", std::string(width - 4, ' '), "  metric                 value     stderr    tokens\n");
  for (const auto& [name, task] : tasks)
    for (const Metric& metric : task.metrics()) {
      const auto fixed = [&](double value) {
        std::snprintf(text, sizeof text, std::abs(value) < 1e6 ? "%.4f" : "%.4g", value);
        return std::string(text);
      };
      const std::string value = fixed(metric.value), error = metric.error ? fixed(*metric.error) : "-";
      std::snprintf(text, sizeof text, "  %-17s %10s %10s %9lld\n", metric.name.c_str(), value.c_str(),
                    error.c_str(), static_cast<long long>(task.tokens()));
      out += name + std::string(width - name.size(), ' ') + text;
    }
  return out;
}

std::string scores_json(const std::map<std::string, TaskMetrics>& tasks) {
  nlohmann::ordered_json out;
  for (const auto& [name, task] : tasks) {
    nlohmann::ordered_json& at = out[name] = {{"examples", task.examples()}, {"tokens", task.tokens()}};
    for (const Metric& metric : task.metrics()) {
      at[metric.name] = metric.value;
      if (metric.error) at[metric.name + "_stderr"] = *metric.error;
    }
  }
  return out.dump(2) + "\n";
}

}  // namespace

CommandLine evaluate_line() {
  CommandLine line(
      "evaluate",
      "Scores log-likelihoods: choices and completions of tasks, perplexity of texts and "
      "datasets; of models with "
      "labels their accuracy and F1 on a dataset; of answers that people compared, how often the "
      "chosen one is above.",
      cat("--checkpoint D (--tasks FILE [--output FILE] | --data PREFIX [--output FILE]) [--limit N] "
          "[--batch-tokens N] [--json] ",
          inference_synopsis));
  line.value("tasks", "FILE", "lines of JSON: context and choices and answer; context and completion; text")
      .value("data", "PREFIX", "a dataset of `sherd prepare`, of which each document is scored")
      .value("output", "FILE",
             "what became of each example of --tasks, or of each pair of --data, as lines of JSON")
      .value("limit", "N", "this many examples or documents only; 0: all", "0")
      .value("batch-tokens", "N", "tokens that a pass takes at most", "4096")
      .json();
  add_inference_options(line);
  return line;
}

void evaluate_command(const CommandLine& line) {
  const std::int64_t most_rows = line.integer("batch-tokens", 1);
  const Questions questions = questions_of(line);
  const Inference inference(line);
  if (inference.config().model->classifies() && questions.dataset) {
    require_same_tokenizer(*questions.dataset, inference.tokenizer());
    const std::string report = classification_report(
        inference, *questions.dataset, questions.limit,
        std::max<std::int64_t>(1, most_rows / inference.config().model->seq_length), line.has("json"));
    std::fwrite(report.data(), 1, report.size(), stdout);
    return;
  }
  if (inference.config().model->has_encoder()) require_answers(questions);
  if (!inference.config().model->causal)
    fail(ErrorKind::config,
         "the model is an encoder (model.causal is false), which gives no text a likelihood: `sherd train` "
         "tells its loss of masked tokens",
         inference.config().model->pairs_texts() ? " and of next sentences" : "", " on the validation split");
  if (questions.dataset) require_same_tokenizer(*questions.dataset, inference.tokenizer());
  if (inference.config().model->gives_rewards() && !questions.preferences)
    fail(ErrorKind::config,
         "the model gives rewards, and texts no likelihood: give --data of answers that people compared "
         "(docs/preferences.md)");
  std::ofstream details;
  if (line.has("output")) {
    line.require_apart("output", "tasks", line.text("tasks"));
    for (const char* ending : {".bin", ".idx", ".json", ".mask", ".reference"})
      line.require_apart("output", "data", line.text("data") + ending);
    details.open(line.text("output"), std::ios::binary | std::ios::trunc);
    if (!details)
      fail(ErrorKind::io, "cannot write ", line.text("output"), ": is its folder there and writable?");
  }
  if (questions.preferences) {
    const std::string report = preference_report(inference, *questions.dataset, questions.limit, most_rows,
                                                 line.has("json"), details.is_open() ? &details : nullptr);
    std::fwrite(report.data(), 1, report.size(), stdout);
    return;
  }
  Evaluation evaluation(inference, questions, most_rows, details.is_open() ? &details : nullptr);
  inference.run(
      "Of evaluation: give --base-format nf4, --offload nvme --nvme-path DIR (or --offload cpu), fewer "
      "--batch-tokens, or --ranks that share the weights",
      [&](const DistributedPtr& dist) { evaluation.run(dist); });
  const std::string report =
      line.has("json") ? scores_json(evaluation.tasks()) : table_of(evaluation.tasks());
  std::fputs(report.c_str(), stdout);
}

}  // namespace sherd::cli

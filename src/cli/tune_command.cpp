#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/random.h"
#include "base/version.h"
#include "cli/command_line.h"
#include "cli/plan_request.h"
#include "cli/program.h"
#include "cli/tune_report.h"
#include "comm/communicator.h"
#include "engine/report/report.h"
#include "engine/stop_signals.h"

namespace sherd::cli {

namespace {

namespace fs = std::filesystem;

/// The steps that earlier calls have measured in a folder, by what decides about a trial's time. A line of
/// JSON each, so that a call that is stopped loses one trial at most. What failed is tried again: somebody
/// may have mended it.
class KnownTrials {
 public:
  explicit KnownTrials(fs::path file) : file_(std::move(file)) {
    std::ifstream in(file_);
    for (std::string line; std::getline(in, line);) {
      const auto known = nlohmann::json::parse(line, nullptr, false);
      if (!known.is_object() || !known.contains("trial") || !known.contains("step_s")) continue;
      add(known["trial"].get<std::string>(), known["step_s"].get<double>());
    }
  }

  /// Seconds of a step; nothing where nobody has measured them.
  std::optional<double> find(const std::string& trial) const {
    const auto found = all_.find(trial);
    return found == all_.end() ? std::nullopt : std::optional(found->second);
  }
  void keep(const std::string& trial, double step_seconds) {
    add(trial, step_seconds);
    write_file_atomically(file_, text_);
  }

 private:
  void add(const std::string& trial, double step_seconds) {
    text_ += nlohmann::ordered_json{{"trial", trial}, {"step_s", step_seconds}}.dump() + "\n";
    all_[trial] = step_seconds;
  }

  fs::path file_;
  std::string text_;
  std::map<std::string, double> all_;
};

struct TuneOptions {
  fs::path folder;
  std::string launcher;
  std::int64_t steps = 8;
  double most_seconds = 0;  ///< after which no trial begins; 0: no limit
  double most_trial_seconds = 600;
};

/// A trial learns nothing that is kept, and does nothing that training does beside its steps.
std::vector<std::string> trial_overrides(const config::Config& config, std::int64_t steps) {
  std::vector<std::string> out{cat("training.steps=", steps), "training.save_dir=",
                               "training.save_interval=0",    "training.eval_interval=0",
                               "training.eval_steps=1",       "training.keep_best=false",
                               "training.patience=0",         "tensorboard.enabled=false",
                               "csv_monitor.enabled=false",   "steps_per_print=0"};
  // An adapter belongs to weights; else any will do.
  if (config.training.adapter.type == config::AdapterType::none) out.emplace_back("training.init_from=");
  return out;
}

/// Tries the layouts of a plan, and tells what came of it.
class Tuning {
 public:
  Tuning(const PlanRequest& request, const TuneOptions& options)
      : request_(request),
        options_(options),
        overrides_(trial_overrides(request.configuration(), options.steps)),
        known_(options.folder / "trials.jsonl") {}

  TuneReport run(planning::SearchResult found) {
    TuneReport report;
    report.folder = options_.folder.string();
    for (planning::Plan& plan : found.best)
      report.layouts.push_back({.plan = std::move(plan), .result = {}, .config = {}});
    const auto begin = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    for (std::size_t i = 0; i < report.layouts.size(); ++i)
      look_at(report, i, options_.most_seconds > 0 && seconds() > options_.most_seconds);
    if (!report.ran().empty()) conclude(report);
    return report;
  }

 private:
  /// Tries a layout, unless that was done before; where `over`, nothing is begun.
  void look_at(TuneReport& report, std::size_t place, bool over) {
    TunedLayout& each = report.layouts[place];
    const std::string name = cat("trial-", place + 1);
    each.config = (options_.folder / (name + ".json")).string();
    request_.write(each.plan, each.config);
    const std::string trial = identity(each.config);
    if (const std::optional<double> before = known_.find(trial)) {
      each.result.step_seconds = *before, each.tried = each.known = true;
      return;
    }
    if (over) return;
    log_info(name, " of ", report.layouts.size(), ": predicted ",
             engine::printed("%.4g s", each.plan.time.seconds));
    each.result = run_trial({.config = each.config,
                             .overrides = overrides_,
                             .folder = options_.folder,
                             .name = name,
                             .ranks = each.plan.layout.ranks,
                             .launcher = options_.launcher,
                             .most_seconds = options_.most_trial_seconds},
                            [] { return engine::StopSignals::received() != 0; });
    each.tried = true;
    if (each.ran()) known_.keep(trial, each.result.step_seconds);
    log_info(name, ": ",
             each.ran() ? engine::printed("%.4g s", each.result.step_seconds) : each.result.failure);
  }

  /// What tells a trial from others: its configuration, how long it is, how it is started, and by what.
  std::string identity(const std::string& config_file) const {
    std::string all = cat(read_file(config_file), options_.launcher, version());
    for (const std::string& override : overrides_) all += override;
    return cat(stable_hash(all));
  }

  /// Corrects the rates, and keeps the machine's file, the fastest's configuration and the picture.
  void conclude(TuneReport& report) const {
    const auto file = [&](const char* name) { return (options_.folder / name).string(); };
    report.correction = planning::correction_of(report.measured());
    PlanRequest again = request_;
    again.machine = planning::corrected(request_.machine, report.correction);
    again.machine.source = cat(request_.machine.source, "; corrected by sherd tune");
    report.machine_file = file("machine.json"), report.best_file = file("best.json");
    write_file_atomically(report.machine_file, config::dump(again.machine));
    request_.write(report.layouts[report.ran().front()].plan, report.best_file);
    write_file_atomically(file("tune.svg"), plot_of(report));
    again.options.top = 1;
    const std::vector<planning::Plan> next = again.search().best;
    const auto is_next = [&](const TunedLayout& each) {
      return each.tried && each.plan.keys() == next.front().keys();
    };
    if (!next.empty() && std::none_of(report.layouts.begin(), report.layouts.end(), is_next))
      report.next = PlanRequest::overrides(next.front());
  }

  const PlanRequest& request_;
  const TuneOptions& options_;
  std::vector<std::string> overrides_;
  KnownTrials known_;
};

CommandLine tune_line() {
  CommandLine line(
      "tune",
      "Tries the layouts that 'sherd plan' finds best: trains each for a few steps, as a program of its own, "
      "and keeps the fastest one's configuration. A layout that fails is a row of the table, not the end. "
      "Tells how far the predictions were off, and writes the machine's file with rates corrected by what "
      "was "
      "seen. Called again with the same folder it goes on where it was stopped. All files are in --dir.",
      "--config F... [--set a.b.c=V]... --machine FILE [--launcher WORDS] [--nodes M] [--gpus N] [--top K] "
      "[--steps N] [--minutes M] [--trial-minutes M] [--dir DIR] [--goal G] [--global-batch N] [--json]");
  PlanRequest::declare(line, "8");
  line.value(
          "launcher", "WORDS",
          "starts the ranks of a trial, as \"mpirun -n 16 --hostfile hosts\"; without one they are threads "
          "here")
      .value("steps", "N", "of each trial, the first of which does not count", "8")
      .value("minutes", "M", "no trial begins after so many; those left wait for the next call")
      .value("trial-minutes", "M", "ends a trial that takes longer", "10")
      .value("dir", "DIR", "folder for what was found, and each trial's files", "tune")
      .flag("json", "print one JSON object");
  return line;
}

TuneOptions options_of(const CommandLine& line, const PlanRequest& request) {
  if (comm::launcher() != comm::Launcher::none)
    throw UsageError(
        "'sherd tune' starts each trial's ranks itself: call it once, and give the launcher's words as "
        "--launcher");
  if (request.options.goal == planning::Goal::memory || request.options.goal == planning::Goal::fewest_gpus)
    throw UsageError(
        "'sherd tune' measures time: --goal time or tokens_per_day. 'sherd plan' has the others");
  TuneOptions out;
  out.launcher = line.text("launcher");
  if (out.launcher.empty() && request.options.ranks > request.machine.devices)
    throw UsageError(cat("ranks of ", request.options.ranks / request.machine.devices,
                         " machines need a launcher: give --launcher, as \"mpirun -n ", request.options.ranks,
                         " --hostfile hosts\""));
  out.steps = line.integer("steps", 2, 10'000);
  const auto seconds = [&](const char* name) {
    const double minutes = line.number(name);
    if (!(minutes > 0)) throw UsageError(cat("--", name, " must be more than 0"));
    return 60 * minutes;
  };
  if (line.has("minutes")) out.most_seconds = seconds("minutes");
  out.most_trial_seconds = seconds("trial-minutes");
  out.folder = line.text("dir");
  std::error_code error;
  fs::create_directories(out.folder, error);
  if (error)
    fail(ErrorKind::io, "cannot make the folder '", out.folder.string(), "' (", error.message(),
         "): choose another by --dir");
  return out;
}

}  // namespace

void tune_command(const Arguments& arguments) {
  CommandLine line = tune_line();
  if (!line.parse(arguments)) return;
  PlanRequest request = PlanRequest::of(line);
  request.options.one_of_each_grid = false;
  const TuneOptions options = options_of(line, request);
  const engine::StopSignals stop_signals(
      "sherd: stopping; what was tried is kept, and the same command goes on from there\n");
  TuneReport report;
  request.files.in_their_words([&] {
    planning::SearchResult found = request.search();
    if (found.best.empty())
      fail(ErrorKind::memory, "nothing fits", found.closest.empty() ? "" : cat(": ", found.closest),
           "; 'sherd plan' tells more");
    report = Tuning(request, options).run(std::move(found));
  });
  std::fputs((line.has("json") ? json_of(report) : text_of(report)).c_str(), stdout);
  if (report.ran().empty()) throw Finding{1};
}

}  // namespace sherd::cli

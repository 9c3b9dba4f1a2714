#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/arena.h"
#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/random.h"
#include "base/run_lock.h"
#include "cli/command_line.h"
#include "cli/planning/plan_request.h"
#include "cli/planning/tune_report.h"
#include "cli/program.h"
#include "comm/communicator.h"
#include "engine/report/report.h"
#include "engine/stop_signals.h"
#include "engine/token_data.h"

namespace sherd::cli {

namespace {

namespace fs = std::filesystem;

/// The trials that earlier calls have run in a folder, by all that decides about their time. The file has a
/// line of JSON for each, so that a call that is stopped loses one trial at most.
class KnownTrials {
 public:
  KnownTrials(fs::path file, bool forget) : file_(std::move(file)) {
    if (forget) return;
    std::ifstream in(file_);
    for (std::string line; std::getline(in, line);) {
      const auto known = nlohmann::json::parse(line, nullptr, false);
      if (!known.is_object() || !known.contains("trial")) continue;  // what a crash left of a line
      add(known.value("trial", ""),
          {known.value("step_s", 0.0), known.value("spread", 0.0), known.value("failure", "")});
    }
  }

  /// Null where nobody has tried it. What failed may have been mended since.
  const TrialResult* find(const std::string& trial) const {
    const auto found = all_.find(trial);
    return found == all_.end() ? nullptr : &found->second;
  }
  void keep(const std::string& trial, const TrialResult& result) {
    add(trial, result);
    write_file_atomically(file_, text_);
  }

 private:
  void add(const std::string& trial, const TrialResult& result) {
    const nlohmann::ordered_json line{{"trial", trial},
                                      {"step_s", result.step_seconds},
                                      {"spread", result.spread},
                                      {"failure", result.failure}};
    text_ += line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    all_[trial] = result;
  }

  fs::path file_;
  std::string text_;
  std::map<std::string, TrialResult> all_;
};

struct TuneOptions {
  fs::path folder;
  bool again = false;  ///< whatever earlier calls have measured
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
  if (config.data) out.emplace_back("data.split=[1,0]");  // nothing to evaluate at the end
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
        program_(fs::read_symlink("/proc/self/exe")),
        known_(options.folder / "trials.jsonl", options.again) {}

  TuneReport run(planning::SearchResult found) {
    TuneReport report;
    report.folder = options_.folder.string(), report.launcher = options_.launcher;
    std::vector<std::size_t> order;
    for (planning::Plan& plan : found.best) {
      order.push_back(report.layouts.size());
      report.layouts.push_back({.plan = std::move(plan), .result = {}, .config = {}});
      prepare(report, order.back());
    }
    // Layouts that failed before come last: they may take all the time again.
    std::stable_partition(order.begin(), order.end(),
                          [&](std::size_t i) { return !known_.find(identities_[i]); });
    const auto begin = std::chrono::steady_clock::now();
    for (const std::size_t place : order) {
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      if (options_.most_seconds > 0 && passed.count() > options_.most_seconds) break;
      if (!report.layouts[place].known) attempt(report, place);
    }
    if (stopped()) fail(ErrorKind::interrupted, "stopped");
    if (!report.ran().empty()) conclude(report);
    return report;
  }

 private:
  static bool stopped() { return engine::StopSignals::received() != 0; }
  static std::string name_of_trial(std::size_t place) { return cat("trial-", place + 1); }

  /// Writes a layout's configuration, and finds what is known of it.
  void prepare(TuneReport& report, std::size_t place) {
    TunedLayout& each = report.layouts[place];
    each.config = (options_.folder / (name_of_trial(place) + ".json")).string();
    request_.write(each.plan, each.config);
    identities_.push_back(identity(each.config));
    const TrialResult* before = known_.find(identities_.back());
    if (before && before->failure.empty()) each.result = *before, each.tried = each.known = true;
  }

  void attempt(TuneReport& report, std::size_t place) {
    TunedLayout& each = report.layouts[place];
    const std::string name = name_of_trial(place);
    log_info(name, " of ", report.layouts.size(), ": predicted ",
             engine::printed("%.4g s", each.plan.time.seconds));
    each.result = run_trial({.program = program_.string(),
                             .config = each.config,
                             .overrides = overrides_,
                             .folder = options_.folder,
                             .name = name,
                             .ranks = each.plan.layout.ranks,
                             .launcher = options_.launcher,
                             .most_seconds = options_.most_trial_seconds},
                            stopped);
    each.tried = true;
    known_.keep(identities_[place], each.result);
    log_info(name, ": ",
             each.ran() ? engine::printed("%.4g s", each.result.step_seconds) : each.result.failure);
  }

  /// A hash of all that tells a trial from others: its configuration, how long it is, how and where it runs,
  /// and the program.
  std::string identity(const std::string& config_file) const {
    std::string all = read_file(config_file);
    std::vector<std::string> parts = overrides_;
    std::error_code unknown;
    const auto changed = fs::last_write_time(program_, unknown).time_since_epoch().count();
    parts.insert(parts.end(), {options_.launcher, cat(changed), cat(available_cores())});
    for (const char* name : {"OMP_NUM_THREADS", "DNNL_MAX_CPU_ISA"})
      if (const char* value = std::getenv(name)) parts.push_back(cat(name, '=', value));
    for (const std::string& part : parts) all += '\0' + part;
    return cat(stable_hash(all));
  }

  /// Corrects the rates, and keeps the machine's file, the fastest's configuration and the picture.
  void conclude(TuneReport& report) const {
    const auto file = [&](const char* name) { return (options_.folder / name).string(); };
    report.correction = planning::correction_of(report.measured());
    PlanRequest again = request_;
    again.machine = planning::corrected(request_.machine, report.correction);
    config::Machine kept = planning::corrected(request_.whole_machine, report.correction);
    kept.source = cat(request_.machine.source, "; corrected by sherd tune");
    report.machine_file = file("machine.json"), report.best_file = file("best.json");
    write_file_atomically(report.machine_file, config::dump(kept));
    const std::int64_t vocabulary = engine::vocabulary_size(request_.configuration());
    for (const std::size_t i : report.ran())
      report.layouts[i].corrected = planning::plan_as_is(report.layouts[i].plan.config, again.machine,
                                                         vocabulary, request_.options.ranks)
                                        .time.seconds;
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
  fs::path program_;
  KnownTrials known_;
  std::vector<std::string> identities_;  ///< of the layouts
};

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
  out.folder = line.text("dir"), out.again = line.has("again");
  return out;
}

}  // namespace

CommandLine tune_line() {
  CommandLine line(
      "tune",
      "Tries the layouts that 'sherd plan' finds best: trains each for a few steps, as a program of its own, "
      "and keeps the fastest one's configuration. A layout that fails is a row of the table, not the end. "
      "Tells how far the predictions were off, and writes the machine's file with corrected rates. Called "
      "again with the same folder it goes on where it was stopped. All files are in --dir.",
      "--config F... [--set a.b.c=V]... --machine FILE [--launcher WORDS] [--nodes M] [--gpus N] [--top K] "
      "[--steps N] [--minutes M] [--trial-minutes M] [--dir DIR] [--again] [--goal G] [--global-batch N] "
      "[--json]");
  PlanRequest::declare(line, "8", "time|tokens_per_day");
  line.value(
          "launcher", "WORDS",
          "starts the ranks of a trial, as \"mpirun -n 16 --hostfile hosts\"; without one they are threads "
          "here")
      .value("steps", "N", "of each trial, the first of which does not count", "8")
      .value("minutes", "M", "no trial begins after so many; those left wait for the next call")
      .value("trial-minutes", "M", "ends a trial that takes longer", "10")
      .value("dir", "DIR", "folder for what was found, and each trial's files", "tune")
      .flag("again", "tries again what earlier calls have measured in the folder")
      .json();
  return line;
}

void tune_command(const CommandLine& line) {
  PlanRequest request = PlanRequest::of(line, "tune");
  request.options.one_of_each_grid = false;
  const TuneOptions options = options_of(line, request);
  const engine::StopSignals stop_signals(
      "sherd: stopping; what was tried is kept, and the same command goes on from there\n");
  TuneReport report;
  request.files.in_their_words([&] {
    planning::SearchResult found = request.search();
    if (found.best.empty()) {
      log_line(LogLevel::error,
               cat("nothing fits: ", found.closest, "; 'sherd estimate' tells what to change"));
      throw Finding{does_not_fit};
    }
    const RunLock lock(options.folder / "lock", {options.folder, "'sherd tune'", "another --dir", false});
    report = Tuning(request, options).run(std::move(found));
  });
  std::fputs((line.has("json") ? json_of(report) : text_of(report)).c_str(), stdout);
  if (report.ran().empty()) throw Finding{1};
}

}  // namespace sherd::cli

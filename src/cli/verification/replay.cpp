#include "cli/verification/replay.h"

#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/files.h"
#include "base/text/excerpt.h"
#include "cli/train_setup.h"
#include "cli/verification/promises.h"
#include "comm/gather.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/same_run.h"
#include "engine/report/progress.h"
#include "engine/report/report.h"
#include "engine/setup/process_grid.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

using engine::CheckpointReader;
using engine::RecordedSteps;

/// The start of the run that saved a checkpoint, by its place in the record; nothing where the record, or the
/// checkpoint, does not tell.
std::optional<std::size_t> start_of(const engine::Manifest& manifest, const RecordedSteps& record) {
  const auto name = manifest.client.find(engine::start_key);
  if (name == manifest.client.end()) return std::nullopt;
  const auto found = std::ranges::find(record.starts, name->second, &RecordedSteps::Start::name);
  if (found == record.starts.end()) return std::nullopt;
  return static_cast<std::size_t>(found - record.starts.begin());
}

/// Refuses keys that decide what is trained: these are the run's.
void require_same_training(const config::Config& saved, const config::Config& config) {
  const auto then = config::settings(saved), now = config::settings(config);
  for (const config::Setting& setting : now) {
    if (setting.concerns != config::Concerns::training) continue;
    const auto found = std::ranges::find(then, setting.key, &config::Setting::key);
    if (found == then.end() || found->value != setting.value)
      fail(ErrorKind::usage, "--set ", setting.key, ": what is trained is as the run had it (",
           found == then.end() ? "not set" : excerpt(found->value),
           "); keys of the machine and of the layout can be set");
  }
}

/// One of a replay's steps against the record.
class StepJudge {
 public:
  StepJudge(const Replay& replay, const RecordedSteps& record, ReplayReport& report)
      : record_(record), report_(report) {
    if (replay.manifest.client.contains(engine::start_key)) {
      const std::optional<std::size_t> start = start_of(replay.manifest, record);
      starts_ = start ? *start + 1 : 0;
      report_.start_lost = !start && knows_a_step(replay.interval);
    }
    report_.lost =
        record.lost(replay.interval.begin, replay.interval.end, starts_.value_or(record.starts.size()));
  }

  void see(const engine::StepReport& step) {
    ++report_.steps;
    const RecordedSteps::Step* recorded = record_.find(step.step);
    // Steps that the run made after it had gone back are none of the checkpoint's.
    if (!recorded || (starts_ && recorded->start >= *starts_)) return;
    ++report_.compared_steps;
    number(step.step, "loss", recorded->loss, step.loss, report_.loss_error);
    number(step.step, "gradient norm", recorded->grad_norm, step.grad_norm, report_.norm_error);
    double unused = 0;
    number(step.step, "loss scale", recorded->loss_scale, step.loss_scale, unused);
    if (recorded->skipped == step.applied)
      differs(step.step, "update", recorded->skipped ? "skipped" : "applied",
              step.applied ? "applied" : "skipped");
  }

 private:
  /// A record that was moved away, or that begins later, has none of them.
  bool knows_a_step(const Interval& interval) const {
    const auto found =
        std::ranges::upper_bound(record_.steps, interval.begin, {}, &RecordedSteps::Step::step);
    return found != record_.steps.end() && found->step <= interval.end;
  }
  void number(std::int64_t step, const char* what, std::optional<double> recorded, double here,
              double& error) {
    const std::optional<double> now = std::isfinite(here) ? std::optional(here) : std::nullopt;
    if (recorded == now) return;
    constexpr double infinite = std::numeric_limits<double>::infinity();
    const double apart = recorded && now
                             ? std::abs(*recorded - *now) / std::max(std::abs(*recorded), std::abs(*now))
                             : infinite;
    error = std::max(error, apart);
    const auto text = [](const std::optional<double>& value) {
      return value ? engine::exact(*value) : std::string("not finite");
    };
    differs(step, what, text(recorded), text(now));
  }
  void differs(std::int64_t step, const char* what, std::string recorded, std::string here) {
    if (!report_.step) report_.step = StepDifference{step, what, std::move(recorded), std::move(here)};
  }

  const RecordedSteps& record_;
  ReplayReport& report_;
  std::optional<std::size_t> starts_;  ///< only steps of so many starts are the checkpoint's; nothing: of all
};

/// Why bits are not promised: by the configuration, and by what each start of the run computed on.
std::vector<std::string> all_missing(const Replay& replay, const RecordedSteps& record,
                                     const engine::RunFacts& here) {
  std::vector<std::string> out =
      missing_promises(RunShape::of(replay.saved, replay.manifest), RunShape::of(replay.config, here.ranks));
  std::vector<bool> seen(record.starts.size());
  if (const std::optional<std::size_t> start = start_of(replay.manifest, record)) seen[*start] = true;
  for (std::int64_t step = replay.interval.begin + 1; step <= replay.interval.end; ++step)
    if (const RecordedSteps::Step* found = record.find(step)) seen[found->start] = true;
  for (std::size_t i = 0; i < seen.size(); ++i)
    for (std::string& line :
         seen[i] ? missing_promises(record.starts[i].facts, here) : std::vector<std::string>())
      if (std::ranges::find(out, line) == out.end()) out.push_back(std::move(line));
  return out;
}

/// How the dataset differs from what the run read.
std::string other_data(const engine::DataRecord& saved, const engine::TokenData& tokens) {
  const engine::DataRecord here = engine::DataRecord::of(tokens);
  if (saved.tokens == 0 || std::tie(saved.tokens, saved.sequences, saved.fingerprint) ==
                               std::tie(here.tokens, here.sequences, here.fingerprint))
    return "";
  return cat("the dataset ", tokens.name(), " had ", saved.tokens, " tokens in ", saved.sequences,
             " sequences (fingerprint ", saved.fingerprint, ") and has ", here.tokens, " in ", here.sequences,
             " (", here.fingerprint, ")");
}

void announce_replay(const Replay& replay, const ReplayReport& report, const engine::RunFacts& facts) {
  std::printf("%s: on %s, %s, %s, %s per rank\n", replay.interval.text().c_str(), facts.world.c_str(),
              facts.device.c_str(), facts.instruction_set.c_str(), counted(facts.threads, "thread").c_str());
  for (const std::string& line : report.missing)
    std::printf("  bits are not promised to be equal: %s\n", line.c_str());
  std::fflush(stdout);
}

/// A checkpoint, opened by all ranks so that it can be read also when it is removed later, of which they have
/// compared the files with their sums.
CheckpointReader open_checkpoint(Distributed& dist, const fs::path& folder) {
  std::optional<CheckpointReader> reader;
  comm::gather_results(dist.world(), "checkpoint to compare with", [&] {
    reader.emplace(folder);
    reader->verify_share(dist.rank(), dist.world_size());
    return true;
  });
  return std::move(*reader);
}

/// Adds what other ranks miss, of machines that may be of another kind. Returns whether any rank misses
/// something.
bool hear_of_others(Distributed& dist, std::vector<std::string>& missing) {
  const auto all = comm::gather_records(dist.world(), std::ssize(missing), "promises that are missing");
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank] > 0 && all[0] == 0 && dist.rank() == 0)
      missing.push_back(cat("rank ", rank, " computes on something else than the run did"));
  return std::ranges::any_of(all, [](std::int64_t count) { return count > 0; });
}

void train_steps(TrainSetup& setup, const Replay& replay, StepJudge& judge) {
  Engine& engine = setup.engine();
  const Interval& interval = replay.interval;
  std::optional<engine::Progress> progress;
  if (engine.dist().rank() == 0)
    progress.emplace(STDERR_FILENO, interval.end,
                     std::max<std::int64_t>(1, (interval.end - interval.begin) / 4));
  while (engine.global_steps() < interval.end) {
    const auto start = std::chrono::steady_clock::now();
    const engine::StepReport& step = setup.train_step();
    judge.see(step);
    if (!progress) continue;
    engine::ProgressState state;
    state.title = "verify: ";
    state.step = step.step, state.total_steps = interval.end;
    state.loss = step.loss, state.grad_norm = step.grad_norm;
    state.lr = step.lr.empty() ? 0 : step.lr.front();
    state.unit = "samples/s";
    state.per_s = static_cast<double>(engine.train_batch_size()) /
                  std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    progress->update(state);
  }
  if (progress) progress->finish();
}

/// Throws where a checkpoint went before it could be read.
void require_there(const Replay& replay, const Error& error) {
  for (const fs::path& folder : {replay.interval.from, replay.interval.to}) {
    std::error_code unknown;
    if (folder.empty() || fs::exists(folder / "manifest.json", unknown)) continue;
    fail(ErrorKind::io, "checkpoint ", folder.string(), " was removed before it could be read",
         replay.saved.training.keep_last > 0 ? " (training.keep_last of a run that goes on)" : "",
         ": verify again, by --step a newer one, or copy checkpoints away first; ", error.what());
  }
}

/// Opens one of the interval's checkpoints on all ranks. Where that is damaged, the report says so, and this
/// returns nothing.
std::unique_ptr<CheckpointReader> open_whole(Distributed& dist, const Replay& replay, const fs::path& folder,
                                             ReplayReport& report) {
  try {
    return std::make_unique<CheckpointReader>(open_checkpoint(dist, folder));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io && error.kind() != ErrorKind::data) throw;
    require_there(replay, error);
    report.unread = error.what();
    return nullptr;
  }
}

ReplayReport replay_steps(const DistributedPtr& dist, const Replay& replay, const RecordedSteps& record,
                          const std::shared_ptr<const engine::TokenData>& data) {
  const Interval& interval = replay.interval;
  ReplayReport report;
  report.data = other_data(replay.manifest.data, *data);
  const std::unique_ptr<CheckpointReader> end = open_whole(*dist, replay, interval.to, report);
  if (!end) return report;
  if (end->manifest().save_id != replay.manifest.save_id)
    fail(ErrorKind::io, "checkpoint ", interval.to.string(),
         " was saved anew meanwhile, by a run that went back: verify again");
  std::unique_ptr<CheckpointReader> begin;
  // Before it is loaded: what fails then, as on a full nvme_path, is no damage.
  if (!interval.from.empty() && !(begin = open_whole(*dist, replay, interval.from, report))) return report;
  TrainSetup setup(dist, replay.config, data);
  Engine& engine = setup.engine();
  const engine::RunFacts facts = engine::RunFacts::of(engine);
  report.missing = all_missing(replay, record, facts);
  const bool to_rounding = hear_of_others(*dist, report.missing);
  if (dist->rank() == 0 && replay.announced) announce_replay(replay, report, facts);
  if (setup.preferences()) setup.preferences()->write_nothing();
  if (interval.from.empty()) {
    setup.begin();
  } else {
    const engine::ClientState client =
        engine.load_checkpoint(interval.from.parent_path().string(), interval.from.filename().string());
    if (setup.preferences()) setup.preferences()->restore(client);
  }
  StepJudge judge(replay, record, report);
  train_steps(setup, replay, judge);
  // Ways from the beginning of the interval tell how far rounding may lead.
  report.states = engine.compare_checkpoint(*end, to_rounding ? begin.get() : nullptr);
  return report;
}

}  // namespace

bool ReplayReport::agrees_nearly(DType compute) const {
  const bool exact = compute == DType::f32;
  const double loss = exact ? 1e-3 : 1e-2, norm = exact ? 1e-2 : 1e-1, ways = 0.25;
  const bool skips_differ = step && step->what == "update";
  return data.empty() && !skips_differ && states.counts_agree && loss_error <= loss && norm_error <= norm &&
         states.weights_error.value_or(0) <= ways;
}

Replay prepare_replay(const Interval& interval, const RecordedSteps& record, int ranks,
                      const std::vector<std::string>& overrides) {
  const fs::path file = interval.to / "manifest.json";
  Replay out;
  out.interval = interval;
  out.manifest = engine::Manifest::from_json(read_file(file), file);
  out.ranks = ranks > 0 ? ranks : out.manifest.world_size;
  const std::string name = cat("the configuration in ", file.string());
  out.saved = config::parse_text(out.manifest.config, name);
  if (!out.saved.model || !out.saved.data)
    fail(
        ErrorKind::config, interval.to.string(),
        " was saved by a program with a model or data of its own: what `sherd train` trains can be replayed");
  std::vector<std::string> all{"log_level=warning"};
  if (const auto start = start_of(out.manifest, record); start && out.saved.device.threads_per_rank == 0)
    all.push_back(cat("device.threads_per_rank=", record.starts[*start].facts.threads));
  all.insert(all.end(), overrides.begin(), overrides.end());
  const auto parse = [text = out.manifest.config, name](std::vector<std::string> keys,
                                                        const std::vector<std::string>& more) {
    keys.insert(keys.end(), more.begin(), more.end());
    return config::parse_text(text, name, keys);
  };
  const config::Config asked = parse(all, {});
  require_same_training(out.saved, asked);
  // The batch of a step and the micro-batches stay, and are shared out anew.
  const auto data_ranks = out.manifest.grid.find(std::string(comm::name_of(comm::Axis::data)));
  if (data_ranks != out.manifest.grid.end() && engine::data_ranks(asked, out.ranks) != data_ranks->second)
    all.push_back("gradient_accumulation_steps=null");
  out.reparse = [parse, all](const std::vector<std::string>& more) { return parse(all, more); };
  out.config = out.reparse({});
  out.config.training.save_dir = interval.to.parent_path().string();  // which may have been moved
  RunShape::of(out.config, out.ranks);  // throws where they cannot share the batch out
  return out;
}

ReplayReport run_replay(const DistributedPtr& dist, const Replay& replay, const RecordedSteps& record,
                        const std::shared_ptr<const engine::TokenData>& data) {
  try {
    return replay_steps(dist, replay, record, data);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::io || error.kind() == ErrorKind::data) require_there(replay, error);
    throw;
  }
}

}  // namespace sherd::cli

#include "engine/trainer.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/waits.h"
#include "comm/gather.h"
#include "data/loader.h"
#include "engine/best_loss.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/preference/preference_run.h"
#include "engine/report/flight_file.h"
#include "engine/report/monitor.h"
#include "engine/report/progress.h"
#include "engine/report/report.h"
#include "engine/report/step_record.h"
#include "engine/setup/fp8_layers.h"
#include "engine/stop_signals.h"
#include "sharding/parallel/experts/moe.h"

namespace sherd {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A caller's function, which may start programs, among the signals that its thread had.
template <class Result, class... Args>
std::function<Result(Args...)> with_signals(std::function<Result(Args...)> function) {
  if (!function) return nullptr;
  return [function = std::move(function)](Args... args) {
    const engine::StopSignals::Lifted lifted;
    return function(std::forward<Args>(args)...);
  };
}

/// Batches of a loader, whose dataset may be the caller's.
std::function<tensor::Batch()> batches_of(data::Loader& loader) {
  return with_signals(std::function<tensor::Batch()>([&loader] {
    const WaitScope waits(WaitFor::data);
    return loader.next();
  }));
}

/// The same for an evaluation.
std::function<data::CountedBatch()> pass_over(data::Loader& loader) {
  loader.seek(0);
  return with_signals(std::function<data::CountedBatch()>([&loader] { return loader.next_of_pass(); }));
}

}  // namespace

Trainer::Trainer(Engine& engine, data::Loader& training, TrainerOptions options)
    : engine_(engine),
      training_(training),
      options_(std::move(options)),
      watch_(std::make_unique<engine::RankWatch>(engine)),
      best_(std::make_unique<engine::BestLoss>()),
      experts_(parallel::layers_of_experts(engine.module())) {
  options_.metrics = with_signals(std::move(options_.metrics));
  options_.after_step = with_signals(std::move(options_.after_step));
  if (settings().steps < 1) fail(ErrorKind::config, "how long to train is not given: set training.steps");
  require_validation();
  const std::int64_t step = engine_.config().batch.train_batch_size, all = training_.samples_at_hand();
  if (speaks() && step > all)
    log_info("a step takes ", counted(step, "sample"), ", and the training data have ", all,
             ": it sees some of them more than once");
  if (!settings().save_dir.empty()) {
    // An engine that has trained may have loaded one of them.
    if (!options_.resume && engine_.global_steps() == 0)
      engine::require_no_checkpoints(settings().save_dir, cat("go on with ", options_.words.resume));
    engine_.claim_save_folder(settings().save_dir);
    if (keeps_local())
      engine_.claim_local_folder(settings().save_dir, settings().local_save_dir, !options_.resume);
  }
  if (options_.resume) resume();
  first_step_ = engine_.global_steps();
  units_ = units_trained();
}

Trainer::~Trainer() = default;

void Trainer::require_validation() const {
  if (options_.validation) {
    if (options_.validation->samples_per_epoch() < 1) fail(ErrorKind::config, "validation has no sample");
    return;
  }
  if (!settings().keep_best && settings().patience == 0) return;
  fail(ErrorKind::config, settings().keep_best ? "training.keep_best" : "training.patience",
       " goes by the validation loss, and there are no validation data: ", options_.words.validation);
}

void Trainer::resume() {
  const std::string& folder = settings().save_dir;
  if (folder.empty())
    fail(ErrorKind::config, options_.words.resume, " reads training.save_dir, which is not set");
  bool local = false;
  if (keeps_local() && options_.resume_tag.empty()) {
    const auto loaded = engine_.load_newest_checkpoint(folder);
    if (!loaded && options_.may_begin) return;
    if (loaded) {
      restore(loaded->client);
      local = loaded->local, saved_step_ = loaded->in_folder;
    }
    resumed_ = loaded.has_value();
  }
  if (!resumed_) restore(engine_.load_checkpoint(folder, options_.resume_tag));
  resumed_ = true;
  // The run may go on from before the best that was found.
  if (speaks() && settings().keep_best)
    engine::point_best(folder, best_->loss() ? cat("global_step", best_->step()) : "");
  if (!local) saved_step_ = saving_step_ = engine_.global_steps();
  if (!speaks()) return;
  log_info("resumed from ", local ? "a local checkpoint" : folder, " at step ", engine_.global_steps());
  if (engine_.global_steps() >= settings().steps)
    log_info("nothing is left to do: training ends at step ", settings().steps,
             "; raise training.steps to go on");
  else if (out_of_patience())
    log_info("nothing is left to do: training.patience is used up; raise it to go on");
}

void Trainer::restore(const engine::ClientState& client) {
  best_->restore(client);
  if (options_.preferences) options_.preferences->restore(client);
}

void Trainer::open_outputs() {
  if (!speaks()) return;
  if (!options_.metrics_file.empty())
    writer_ = std::make_unique<engine::MetricsWriter>(options_.metrics_file, first_step_ + 1);
  monitors_ = std::make_unique<engine::Monitors>(
      engine_.config(), first_step_ > 0 ? std::optional(engine_.global_samples()) : std::nullopt);
  if (options_.progress)
    progress_ = std::make_unique<engine::Progress>(STDERR_FILENO, settings().steps, settings().log_interval);
}

/// The signal that asked a rank to stop; 0 where none was asked. Asked when the step is told and saved, so
/// that a signal in either ends training with this step; the gather of ranks' times, which are told, comes
/// before.
int Trainer::stop_signal() {
  std::int32_t signal = engine::StopSignals::received();
  comm::reduce_values(engine_.dist().world(), engine_.device(), std::span(&signal, 1), "stop flag",
                      comm::ReduceOp::max);
  return signal;
}

int Trainer::train_steps() {
  int signal = 0;
  while (engine_.global_steps() < settings().steps && !out_of_patience() && (signal = stop_signal()) == 0) {
    train_step();
    if (save_is_due())
      save(settings().save_async);
    else
      save_locally();
  }
  if (!settings().save_dir.empty() && saving_step_ != engine_.global_steps()) save(false);
  engine_.finish_save();
  note_saved();
  if (keeps_local()) engine_.remove_local_checkpoints();  // all of it is in the run's folder
  engine_.synchronize();  // a GPU's last update has been looked at only where it was saved or evaluated
  return signal;
}

/// An error's message with what the program's user can do next, unless another rank has said it.
std::string Trainer::with_next_step(const std::string& message) const {
  const auto& [resume, tag, validation] = options_.words;
  if (message.find(resume) != std::string::npos) return message;
  const std::string& folder = settings().save_dir;
  const std::int64_t local = engine_.newest_local_checkpoint().step;
  const std::string begun = !engine_.save_under_way()
                                ? ""
                                : cat("that of step ", saving_step_, " was being written and may be whole");
  std::string there = local > saved_step_ ? cat("local checkpoint of step ", local) : "";
  if (saved_step_ >= 0)
    there += cat(there.empty() ? "" : ", else ", "checkpoint of step ", saved_step_, " in ", folder);
  if (there.empty() && begun.empty()) return message;
  if (there.empty())
    return cat(message, "; go on with ", resume, " if there is a checkpoint in ", folder, ": ", begun);
  return cat(message, "; go on with ", resume, " (", there, begun.empty() ? "" : "; ", begun,
             saved_step_ < 0 ? "" : cat(", or an earlier one with ", tag), ")");
}

int Trainer::run() {
  const int signal = train_until_stopped();
  if (progress_) progress_->finish();
  if (speaks()) report_end(signal);
  return signal;
}

/// Later signals do what the program says again once training has stopped.
int Trainer::train_until_stopped() {
  const std::string asked = engine::flight_folder(settings().save_dir), folder = asked.empty() ? "." : asked;
  const engine::StopSignals stop_signals(
      "\nsherd: stopping after this step, and saving where training.save_dir is set; the same "
      "signal again, a second from now or later, ends the run at once, unsaved\n",
      [recorder = engine_.dist().world().flight_recorder(), folder] {
        engine::write_flight(*recorder, folder, "SIGUSR2");
      });
  open_outputs();
  try {
    return train_steps();
  } catch (const Error& error) {
    throw Error(error.kind(), with_next_step(error.what()));
  }
}

/// Why training ends before its last step, and what is the best of it.
void Trainer::report_end(int signal) const {
  if (signal != 0)
    log_info("stopped by SIG", ::sigabbrev_np(signal), " after step ", engine_.global_steps(),
             saved_step_ < 0
                 ? "; nothing was saved because training.save_dir is not set"
                 : cat("; go on with ", options_.words.resume, " (checkpoint in ", settings().save_dir, ")"));
  if (out_of_patience() && engine_.global_steps() > first_step_)
    log_info("stopped after step ", engine_.global_steps(), ": ",
             counted(best_->without_improvement(), "evaluation"),
             " without a lower validation loss (training.patience)",
             best_->loss() ? cat("; the lowest, ", *best_->loss(), ", was after step ", best_->step()) : "");
  if (!settings().keep_best || settings().save_dir.empty() || !best_->loss()) return;
  const auto folder = std::filesystem::path(settings().save_dir) / cat("global_step", best_->step());
  if (std::filesystem::exists(folder / "manifest.json"))
    log_info("the best checkpoint is ", folder.string(), ", with validation loss ", *best_->loss());
}

std::string Trainer::ranks_table() const {
  return watch_->table();
}

bool Trainer::counts_tokens() const {
  return options_.tokens_per_sample > 0 || training_.tokens_before(0).has_value();
}

/// Tokens, or samples of which nobody counts them, since the beginning of training.
std::int64_t Trainer::units_trained() const {
  if (const std::optional<std::int64_t> tokens = training_.tokens_before(training_.position()))
    return *tokens;
  return engine_.global_samples() * std::max<std::int64_t>(options_.tokens_per_sample, 1);
}

bool Trainer::out_of_patience() const {
  return settings().patience > 0 && best_->without_improvement() >= settings().patience;
}

void Trainer::train_step() {
  const auto start = std::chrono::steady_clock::now();
  const engine::IoBytes before = engine_.io_bytes();
  watch_->begin_step();
  std::function<tensor::Batch()> next = batches_of(training_);
  if (options_.preferences) next = options_.preferences->begin_step(next);
  engine_.train_batch(next);
  if (options_.preferences) step_means_ = options_.preferences->end_step();
  const double seconds = seconds_since(start);
  note_saved();
  totals_.step_seconds.push_back(seconds);
  const std::int64_t before_step = std::exchange(units_, units_trained());
  totals_.units += units_ - before_step;
  units_per_s_ = static_cast<double>(units_ - before_step) / totals_.step_seconds.back();
  step_io_ = engine_.io_bytes() - before;
  add_up_step();
  watch_->end_step(seconds);
  const std::int64_t step = engine_.global_steps(), every = settings().eval_interval;
  evaluated_ = options_.validation && (step == settings().steps || (every > 0 && step % every == 0));
  if (evaluated_) evaluate();
  if (speaks() && options_.mfu) mfu_ = options_.mfu(units_per_s_);
  tell();
}

void Trainer::add_up_step() {
  step_traffic_ = engine_.groups().traffic();
  engine_.groups().reset_traffic();
  totals_.traffic.resize(step_traffic_.size());
  for (std::size_t i = 0; i < step_traffic_.size(); ++i) {
    totals_.traffic[i].axis = step_traffic_[i].axis;
    totals_.traffic[i].traffic.add(step_traffic_[i].traffic);
  }
  step_routing_.clear();
  totals_.routing.resize(experts_.size());
  for (std::size_t i = 0; i < experts_.size(); ++i) {
    const auto& [name, layer] = experts_[i];
    step_routing_.emplace_back(name, layer->last_step());
    totals_.routing[i].first = name;
    totals_.routing[i].second.add(layer->last_step());
  }
}

void Trainer::evaluate() {
  data::Loader& validation = *options_.validation;
  if (options_.preferences) {
    auto [loss, metrics] = options_.preferences->evaluate(validation);
    val_loss_ = loss, means_ = std::move(metrics);
  } else {
    val_loss_ = engine_.eval_batches(pass_over(validation), validation.batches_per_epoch());
  }
  if (options_.metrics)
    means_ = engine_.evaluate(pass_over(validation), validation.batches_per_epoch(), options_.metrics);
  best_->see(engine_.global_steps(), *val_loss_);
  engine_.groups().reset_traffic();
}

bool Trainer::save_is_due() const {
  if (settings().save_dir.empty()) return false;
  const bool best = settings().keep_best && evaluated_ && best_->improved();
  return best || (settings().save_interval > 0 && engine_.global_steps() % settings().save_interval == 0);
}

/// Adds this run's entries to a checkpoint, beside its states. The record is synced, as the checkpoint will
/// be: so a disk with the checkpoint has the steps before it.
void Trainer::tell_checkpoint(engine::ClientState& client) {
  best_->save(client);
  if (options_.preferences) options_.preferences->save(client);
  if (!record_) return;
  record_->sync();
  client[engine::start_key] = record_->start();
}

/// Saves on each machine where that is due, or was while another save was under way.
void Trainer::save_locally() {
  if (!keeps_local()) return;
  local_due_ = local_due_ || engine_.global_steps() % settings().local_save_interval == 0;
  if (!local_due_ || engine_.save_under_way()) return;
  engine::SaveOptions options;
  options.async = settings().save_async;
  tell_checkpoint(options.client);
  local_due_ = !engine_.save_local_checkpoint(options);
  engine_.groups().reset_traffic();
}

void Trainer::save(bool async) {
  engine_.finish_save();
  note_saved();
  local_due_ = false;
  engine::SaveOptions options;
  options.async = async;
  options.best = settings().keep_best && evaluated_ && best_->improved();
  options.keep_last = settings().keep_last;
  if (evaluated_) options.client["val_loss"] = engine::exact(*val_loss_);
  tell_checkpoint(options.client);
  engine_.save_checkpoint(settings().save_dir, options);
  saving_step_ = engine_.global_steps();
  note_saved();
  engine_.groups().reset_traffic();
}

/// A save under way is whole once the engine, on all ranks alike, is through with it.
void Trainer::note_saved() {
  if (saving_step_ >= 0 && !engine_.save_under_way()) saved_step_ = saving_step_;
}

engine::StepMetrics Trainer::metrics_of_step() const {
  const engine::StepReport& step = engine_.last_step();
  engine::StepMetrics line;
  line.step = engine_.global_steps();
  line.loss = step.loss;
  line.objective = step_means_;
  if (evaluated_) line.val_loss = val_loss_, line.metrics = means_;
  line.lr = step.lr.empty() ? 0 : step.lr.front();
  line.lrs = step.lr;
  line.grad_norm = step.grad_norm;
  line.loss_scale = step.loss_scale;
  line.skipped = !step.applied;
  line.tokens = units_;
  line.step_ms = totals_.step_seconds.back() * 1e3;
  line.tokens_per_s = units_per_s_;
  line.mfu = mfu_;
  line.experts = step_routing_;
  if (engine_.fp8().enabled()) {
    const engine::Fp8Layers::Lost lost = engine_.fp8().take_lost();
    line.fp8 = {
        static_cast<double>(lost.to_zero) / static_cast<double>(std::max<std::int64_t>(1, lost.elements)),
        lost.not_finite};
  }
  const device::Ledger& ledger = engine_.device().ledger();
  line.mem = {ledger.peak(device::Tier::device), ledger.peak(device::Tier::host),
              ledger.peak(device::Tier::nvme)};
  for (const auto& [axis, bytes] : step_traffic_) line.comm.add(bytes);
  line.axes = step_traffic_;
  line.io = step_io_;
  line.ranks = watch_->last();
  line.saved_step = saved_step_;
  line.local = engine_.newest_local_checkpoint();
  return line;
}

/// Begun only with a step, so that a run that has nothing left to do takes nothing out of it.
void Trainer::record(const engine::StepMetrics& step) {
  if (!speaks() || settings().save_dir.empty()) return;
  if (!record_)
    record_ =
        std::make_unique<engine::StepRecord>(settings().save_dir, first_step_, engine::RunFacts::of(engine_));
  record_->write(step);
}

/// The files, the caller and whoever watches.
void Trainer::tell() {
  const engine::StepMetrics line = metrics_of_step();
  record(line);
  if (writer_) writer_->write(line);
  if (monitors_ && monitors_->enabled()) monitors_->write(line, engine_.global_samples());
  if (progress_) {
    engine::ProgressState state;
    state.step = line.step;
    state.total_steps = settings().steps;
    state.loss = line.loss;
    state.val_loss = val_loss_;
    state.metrics = means_;
    state.lr = line.lr;
    state.lrs = line.lrs;
    state.grad_norm = line.grad_norm;
    state.per_s = line.tokens_per_s;
    state.unit = counts_tokens() ? "tok/s" : "samples/s";
    state.mfu = mfu_;
    progress_->update(state, evaluated_);
  }
  if (options_.after_step) options_.after_step(line);
}

}  // namespace sherd

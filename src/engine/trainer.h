#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/report/metrics.h"

namespace sherd {

namespace engine {
class BestLoss;
class PreferenceRun;
class Monitors;
class Progress;
class StepRecord;
class RankWatch;
class StopSignals;
}  // namespace engine

/// The inputs of a Trainer beside the configuration, whose section `training` says the rest: steps, when to
/// evaluate and to save, where, what to keep, when to stop early (docs/config.md).
struct TrainerOptions {
  /// One epoch of it is an evaluation, from its beginning; what is left over behind whole batches of all
  /// ranks is not looked at. Null: nothing is evaluated. Outlives the trainer.
  data::Loader* validation = nullptr;
  /// Evaluated beside the loss, with each evaluation, as Engine::evaluate() does.
  engine::AddMetrics metrics = nullptr;
  /// Where preferences are learned: prepares steps and evaluates. Outlives the trainer.
  engine::PreferenceRun* preferences = nullptr;
  bool resume = false;         ///< from training.save_dir's latest checkpoint, or `resume_tag`
  bool may_begin = false;      ///< with `resume`: begins where there is no checkpoint, local or other
  std::string resume_tag{};    ///< another one
  std::string metrics_file{};  ///< a line of JSON per step (engine::StepMetrics) goes there; empty: nowhere
  bool progress = true;        ///< rank 0 shows it on standard error: a bar on a terminal, else plain lines
  /// Tokens of samples that the loader does not count (Loader::tokens_before). Rates and counts are in tokens
  /// where either is known, else in samples.
  std::int64_t tokens_per_sample = 0;
  /// On rank 0's program alone: the share of the machine's speed that this many tokens, or else samples, per
  /// second are, shown and told as MFU.
  std::function<std::optional<double>(double per_second)> mfu = nullptr;
  /// Called by every rank after each step, with what the metrics file is told of it on this rank.
  std::function<void(const engine::StepMetrics&)> after_step = nullptr;
  /// How the program's user asks for what errors and messages speak of.
  struct Words {
    std::string resume = "TrainerOptions::resume", tag = "TrainerOptions::resume_tag",
                validation = "give TrainerOptions::validation";
  } words{};
};

/// Trains an engine on a loader's batches to the end: progress, signals, validation, metrics, monitors,
/// checkpoints, the best of them and early stopping, as `sherd train` does. One per rank, used from its
/// thread; rank 0 speaks.
///
///     Trainer(*engine, *loader, {.validation = &held_out}).run();
class Trainer {
 public:
  /// The totals of a run.
  struct Totals {
    std::vector<double> step_seconds;                                      ///< one for each step of this run
    std::int64_t units = 0;                                                ///< tokens of them, or samples
    std::vector<comm::ProcessGroups::AxisTraffic> traffic;                 ///< this rank's, in training alone
    std::vector<std::pair<std::string, parallel::RoutingTotals>> routing;  ///< by layer of experts
  };

  /// Claims training.save_dir, and resumes where asked. `training` is the loader that the engine's
  /// checkpoints know (initialize(), Engine::set_training_data()); both outlive this. Throws Error{config}
  /// where there are no steps to train, no validation for what goes by it, or a save_dir that holds
  /// checkpoints from which it does not go on. Collective.
  Trainer(Engine& engine, data::Loader& training, TrainerOptions options = {});
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Trains until the last step, until patience is used up, or until a signal asked a rank to stop: then the
  /// step is finished. In all cases a checkpoint is written where training.save_dir is set. Returns the
  /// signal, the same on all ranks; else 0. Errors name the checkpoint from which to go on. Once.
  /// Collective.
  int run();

  const std::optional<double>& validation_loss() const { return val_loss_; }  ///< the newest evaluation's
  const engine::MetricMeans& metrics() const { return means_; }               ///< the newest evaluation's
  const Totals& totals() const { return totals_; }
  bool resumed() const { return resumed_; }  ///< whether it goes on from a checkpoint
  /// A table of all ranks' times, on rank 0; empty where they are not measured.
  std::string ranks_table() const;

 private:
  bool speaks() const { return engine_.dist().rank() == 0; }
  const config::Training& settings() const { return engine_.config().training; }
  bool counts_tokens() const;
  std::int64_t units_trained() const;
  void require_validation() const;
  bool keeps_local() const { return !settings().save_dir.empty() && settings().local_save_interval > 0; }
  void resume();
  void restore(const engine::ClientState& client);
  void open_outputs();
  int train_steps();
  void train_step();
  void add_up_step();
  void evaluate();
  bool save_is_due() const;
  void save(bool async);
  void save_locally();
  void tell_checkpoint(engine::ClientState& client);
  void note_saved();
  bool out_of_patience() const;
  engine::StepMetrics metrics_of_step() const;
  void record(const engine::StepMetrics& step);
  void tell();
  void report_end(int signal) const;
  std::string with_next_step(const std::string& message) const;
  int stop_signal();
  int train_until_stopped();

  Engine& engine_;
  data::Loader& training_;
  TrainerOptions options_;
  std::unique_ptr<engine::RankWatch> watch_;
  std::unique_ptr<engine::BestLoss> best_;  ///< over all evaluations, those before a resume included
  std::unique_ptr<engine::MetricsWriter> writer_;
  std::unique_ptr<engine::StepRecord> record_;  ///< on rank 0, from the first step on, where it saves
  std::unique_ptr<engine::Monitors> monitors_;
  std::unique_ptr<engine::Progress> progress_;
  std::int64_t units_ = 0;          ///< tokens, or else samples, that all ranks have trained on
  double units_per_s_ = 0;          ///< in the newest step
  std::optional<double> mfu_;       ///< the newest step's, on rank 0
  std::optional<double> val_loss_;  ///< the newest evaluation's
  engine::MetricMeans means_, step_means_;  ///< the newest evaluation's; the newest step's
  bool evaluated_ = false;  ///< after the newest step
  bool resumed_ = false;
  bool local_due_ = false;         ///< a local checkpoint waits for another save
  std::int64_t saved_step_ = -1;   ///< the newest checkpoint that is whole, but for local ones
  std::int64_t saving_step_ = -1;  ///< the newest one that this run has begun, or went on from
  std::int64_t first_step_ = 0;
  Totals totals_;
  std::vector<comm::ProcessGroups::AxisTraffic> step_traffic_;
  engine::IoBytes step_io_;
  std::vector<std::pair<std::string, parallel::Moe*>> experts_;  ///< the model's layers of experts
  std::vector<std::pair<std::string, parallel::RoutingTotals>> step_routing_;
};

}  // namespace sherd

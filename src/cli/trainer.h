#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/best_loss.h"
#include "cli/progress.h"
#include "cli/stop_signals.h"
#include "cli/train.h"
#include "engine/engine.h"
#include "engine/metrics.h"
#include "engine/monitor.h"
#include "engine/trace.h"
#include "models/gpt.h"

namespace sherd::cli {

/// One rank's training run: data, engine, loop, evaluation, checkpoints, metrics. Rank 0 speaks.
class Trainer {
 public:
  /// Collective. `gemm_rate`: FLOP/s that all ranks together can reach, for MFU; 0: unknown. `better_rate`:
  /// asked by rank 0 when a step reached more, for a rate that is at least as high.
  Trainer(DistributedPtr dist, const TrainRequest& request, std::shared_ptr<const engine::TokenData> data,
          double gemm_rate, std::function<double(double reached)> better_rate);

  /// Collective. Trains until the last step, or until a signal asked a rank to stop: then the step is
  /// finished. Either way a checkpoint is written where save_dir is set, and rank 0 prints its tables.
  /// Returns the signal, the same on all ranks; 0 after the last step. Errors of this rank's own name the
  /// checkpoint from which to go on.
  int run();

 private:
  bool speaks() const { return dist_->rank() == 0; }
  std::string layout_shown() const;
  void announce() const;
  /// Takes the weights of training.init_from.
  void begin_from(const std::string& folder);
  void warn_of_other_tokenizer(const engine::ExtraFiles& companions) const;
  void resume();
  void train_step();
  void rate_step();
  void evaluate();
  std::int64_t validation_batches() const;
  void require_base() const;
  void require_validation() const;
  bool save_is_due() const;
  void save(bool async);
  void note_saved();
  bool out_of_patience() const;
  void report_end(int signal) const;
  void write_metrics();
  void show(bool evaluated);
  void report();
  void report_trace();
  int train_steps();
  std::string with_next_step(const std::string& message) const;
  int stop_signal();

  DistributedPtr dist_;
  const TrainRequest& request_;
  std::shared_ptr<const engine::TokenData> data_;
  models::GptOptions shape_;
  std::unique_ptr<engine::Trace> trace_;  ///< null: not asked for
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<data::Loader> train_loader_, validation_loader_;
  std::unique_ptr<engine::MetricsWriter> metrics_;
  std::unique_ptr<engine::Monitors> monitors_;
  std::unique_ptr<StopSignals> stop_signals_;  ///< from the first step on
  std::unique_ptr<Progress> progress_;
  double gemm_rate_;
  std::function<double(double)> better_rate_;
  double tokens_per_s_ = 0;           ///< of the newest step
  std::optional<double> mfu_;         ///< of the newest step, on rank 0
  std::optional<double> val_loss_;    ///< of the newest evaluation
  bool evaluated_ = false;            ///< after the newest step
  BestLoss best_;                     ///< of all evaluations, those before a resume included
  std::int64_t saved_step_ = -1;      ///< of the newest checkpoint that is whole
  std::int64_t saving_step_ = -1;     ///< of the newest one that was begun
  std::vector<double> step_seconds_;  ///< of this run's steps
  std::vector<comm::ProcessGroups::AxisTraffic> step_traffic_;
  engine::IoBytes step_io_;
  std::vector<comm::ProcessGroups::AxisTraffic> total_traffic_;
  std::vector<std::pair<std::string, parallel::Moe*>> experts_;  ///< the model's layers of experts
  std::vector<std::pair<std::string, parallel::RoutingTotals>> step_routing_, total_routing_;
  std::int64_t first_step_ = 0;
};

}  // namespace sherd::cli

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cli/train_setup.h"
#include "engine/report/prometheus.h"
#include "engine/report/trace.h"
#include "engine/token_data.h"
#include "engine/trainer.h"
#include "planning/fit.h"

namespace sherd::cli {

/// A request to `sherd train`.
struct TrainRequest {
  config::Config config;      ///< as reparse({}) gives it; train() in train_command.cpp reads it
  planning::Reparse reparse;  ///< the configuration, with a few more keys
  int ranks = 0;         ///< 0: the launcher's, or one local rank; a launcher that started others is an error
  std::string trace;     ///< file for the trace of all ranks; empty: none
  std::string metrics;   ///< JSONL file; empty: none
  int metrics_port = 0;  ///< of an HTTP server for Prometheus, on rank 0; 0: none
  std::string metrics_address;
  std::string metrics_textfile;  ///< the same page as a file, of rank 0; empty: none
  std::string plot;              ///< SVG of the losses, drawn at the end; empty: none
  std::int64_t fp8_report = 0;   ///< micro-batches on which FP8 is measured in place of training; 0: trains
  bool resume = false;           ///< from training.save_dir's latest checkpoint
  std::string resume_tag;        ///< another tag
  bool resume_or_start = false;  ///< `resume` where there is a checkpoint; train() finds out
  bool json = false;             ///< what is reported is one JSON object
};

/// One rank's training run: data, engine, a Trainer, and what is told of it before and after. Rank 0 speaks.
class TrainRun {
 public:
  /// Collective. `gemm_rate`: FLOP/s that all ranks together can reach, for MFU; 0: unknown. `better_rate`:
  /// asked by rank 0 when a step reached more, for a rate that is at least as high.
  TrainRun(DistributedPtr dist, const TrainRequest& request, std::shared_ptr<const engine::TokenData> data,
           double gemm_rate, std::function<double(double reached)> better_rate);

  /// Collective. Trains (Trainer::run()), after which rank 0 prints its tables. Returns the signal that
  /// stopped it, the same on all ranks; else 0.
  int run();

 private:
  bool speaks() const { return dist_->rank() == 0; }
  std::string layout_shown() const;
  Engine& engine() const { return setup_.engine(); }
  const models::GptConfig& shape() const { return setup_.shape(); }
  void make_validation_loader();
  TrainerOptions trainer_options();
  void announce() const;
  std::optional<double> mfu(double tokens_per_second);
  void report() const;
  void report_json(const std::vector<engine::MemoryReport>& all) const;
  void report_trace();
  void report_fp8();

  DistributedPtr dist_;
  const TrainRequest& request_;
  std::shared_ptr<const engine::TokenData> data_;
  std::unique_ptr<engine::MetricsServer> server_;      ///< rank 0's; null: not asked for
  std::unique_ptr<engine::MetricsTextfile> textfile_;  ///< so too
  std::unique_ptr<engine::Trace> trace_;               ///< null: not asked for
  TrainSetup setup_;
  std::unique_ptr<data::Loader> validation_loader_;
  std::unique_ptr<Trainer> trainer_;
  double gemm_rate_;
  std::function<double(double)> better_rate_;
};

}  // namespace sherd::cli

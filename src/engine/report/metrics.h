#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/process_groups.h"
#include "engine/report/rank_times.h"
#include "engine/step/step_report.h"
#include "sharding/parallel/experts/moe.h"

namespace sherd::engine {

/// A step as `--metrics` tells it.
struct StepMetrics {
  std::int64_t step = 0;                    ///< optimizer steps done, this one included: 1, 2, …
  double loss = 0;                          ///< mean over micro-batches and ranks
  std::optional<double> val_loss;           ///< only after steps that evaluated
  std::map<std::string, double> metrics;    ///< so too: what a Trainer was given to evaluate beside the loss
  std::map<std::string, double> objective;  ///< what the objective tells of the step; empty: nothing
  double lr = 0;                            ///< the first parameter group's, as this step used it
  std::vector<double> lrs;                  ///< all parameter groups'; only where there are several
  double grad_norm = 0;                     ///< before clipping
  double loss_scale = 1;
  bool skipped = false;  ///< the step changed nothing, because its gradients overflowed
  /// All ranks, since the beginning of training; samples where the model is not known to have tokens.
  std::int64_t tokens = 0;
  double step_ms = 0;       ///< wall time of this step
  double tokens_per_s = 0;  ///< all ranks, this step
  /// Model FLOP/s over the GEMM rate, of GPUs over the peak; null when that is unknown.
  std::optional<double> mfu;
  /// All ranks' together, in this step, by the path of each layer of experts; empty: the model has none.
  std::vector<std::pair<std::string, parallel::RoutingTotals>> experts;
  /// Losses among the elements that FP8 products quantised on this rank since the step before, evaluations
  /// included: the share that was not zero and became zero, and how many were infinite or NaN. Not set: no
  /// product is in FP8.
  struct Fp8 {
    double to_zero = 0;
    std::int64_t not_finite = 0;
  };
  std::optional<Fp8> fp8;
  struct Memory {
    std::uint64_t device_peak = 0, host_peak = 0, nvme_peak = 0;
  } mem;                                               ///< bytes on this rank
  comm::Traffic comm;                                  ///< this rank, this step; scalars are left out
  std::vector<comm::ProcessGroups::AxisTraffic> axes;  ///< the same by axis of the process grid
  IoBytes io;                                          ///< this rank, this step
  std::vector<RankTimes> ranks;  ///< this step, by rank; empty: not measured (RankWatch)
  std::int64_t saved_step = -1;  ///< of the newest checkpoint in training.save_dir that is whole; -1: none
  NewestLocal local;             ///< the newest local checkpoint
};

/// The work of the routers of a step's layers of experts, in the mean of layers and micro-batches.
struct RoutingMeans {
  double balance = 0, z = 0;  ///< losses
  double dropped = 0;         ///< share of choices
};
RoutingMeans routing_means(const StepMetrics& metrics);

/// The step as one line of JSON without the newline: keys in the order of StepMetrics, doubles with the
/// fewest digits that read back to the same bits. JSON has no NaN and no infinity; both become null.
std::string to_json(const StepMetrics& metrics);

/// A JSONL file with a line per step, in the words of errors.
struct StepFileWords {
  const char *what = "the metrics file", *lines = "metrics",
             *advice = "Give --metrics another file, or move this one away";
};

/// Appends one line per step to a JSONL file, each with one write, so that a reader of the growing file never
/// sees half a line (unless the machine stops within the write). Throws Error{io}.
class MetricsWriter {
 public:
  /// Begins a new file when `first_step` is 1. For a resumed run, whose next step is `first_step`, keeps the
  /// lines of earlier steps and drops the others, which training will write again: whole files are replaced
  /// atomically. Throws Error{data} when the file to continue is not a metrics file.
  explicit MetricsWriter(std::filesystem::path path, std::int64_t first_step = 1,
                         const StepFileWords& words = {});
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void write(const StepMetrics& metrics) { write(to_json(metrics)); }
  /// Any JSON object with an integer `step`, without the newline.
  void write(const std::string& line);
  /// Waits until the lines so far outlive the machine.
  void sync();

 private:
  std::unique_ptr<class AppendFile> file_;
};

}  // namespace sherd::engine

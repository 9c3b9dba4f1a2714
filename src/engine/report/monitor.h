#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/report/metrics.h"

namespace sherd::engine {

/// A number with a name, as TensorBoard calls it.
struct Scalar {
  std::string tag;  ///< "Train/Samples/train_loss"
  double value = 0;
};

/// A step's scalars for monitors, under DeepSpeed's names where it has one: train_loss, lr (of the first
/// group, as the step used it), with fp16 loss_scale, after evaluations eval_loss; beside them eval_NAME of
/// each metric, grad_norm, step_ms, tokens_per_s, mfu where it is known, and of models with experts
/// moe_balance_loss, moe_z_loss and moe_dropped. All begin with "Train/Samples/".
std::vector<Scalar> scalars_of(const StepMetrics& metrics, bool fp16);

/// The sections `tensorboard` and `csv_monitor`, written as DeepSpeed lays them out, into
/// `output_path`/`job_name`: an event file for TensorBoard, and a CSV file for each tag. The x axis counts
/// samples of all ranks. Each step is written at once, so that a run that is killed keeps what it wrote. For
/// one thread of one rank.
class Monitors {
 public:
  /// Opens what is enabled. A resumed run gives the samples that its checkpoint had seen: what files of this
  /// run hold beyond them is dropped, since it comes again. Throws Error{io} where a folder or file cannot be
  /// written.
  explicit Monitors(const config::Config& config, std::optional<std::int64_t> resumed_at = {});
  ~Monitors();
  Monitors(const Monitors&) = delete;
  Monitors& operator=(const Monitors&) = delete;

  bool enabled() const { return events_ || csv_; }
  /// `samples`: of all ranks since the beginning of training, this step's included. Throws Error{io}.
  void write(const StepMetrics& metrics, std::int64_t samples);

 private:
  bool fp16_;
  std::unique_ptr<class EventFile> events_;
  std::unique_ptr<class CsvFiles> csv_;
};

}  // namespace sherd::engine

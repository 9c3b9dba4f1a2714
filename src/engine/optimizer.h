#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "device/stream.h"
#include "optim/description.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"
#include "optim/update_rule.h"
#include "sharding/segment.h"

namespace sherd::engine {

/// All states of a stretch of a segment in memory, from flat element `begin` on; `masters` as the segment's
/// form says, undefined where the parameters are the masters.
struct UpdateView {
  const sharding::Segment* segment = nullptr;
  std::int64_t begin = 0;
  tensor::Tensor parameters, gradients, masters;
  std::vector<tensor::Tensor> moments;
};

/// Applies an update rule (optim/) to the flat segments that this rank updates. Holds the hyper-parameters
/// and the count of steps; the moments live with the segments. Used from the rank's thread.
class Optimizer {
 public:
  /// `seed`: of the stochastic rounding of 16-bit moments.
  Optimizer(const config::Optimizer& config, std::uint64_t seed)
      : hyper_(config), description_(optim::describe(hyper_)), seed_(seed) {
    for (const optim::State& state : description_.states) names_.push_back(state.name);
  }

  /// What the rule keeps and needs.
  const optim::Description& description() const { return description_; }

  /// Tensors that the rule keeps beside the weights, and their names in checkpoints ("exp_avg", …).
  int moments() const { return static_cast<int>(moment_names().size()); }
  const std::vector<std::string>& moment_names() const { return names_; }

  /// Learning rates, one per parameter group (Sherd has one).
  std::vector<double> lr() const { return {hyper_.lr}; }
  /// Holds from the next step on until a scheduler moves; checkpoints keep it.
  void set_lr(double lr) { hyper_.lr = lr, own_lr_ = lr; }
  /// What set_lr() was given, unless a scheduler has moved since.
  std::optional<double> own_lr() const { return own_lr_; }
  void set_scheduled_lr(double lr) { hyper_.lr = lr, own_lr_.reset(); }
  optim::Hyper& hyper() { return hyper_; }

  /// Updates applied so far; the rule's bias correction counts from it.
  std::int64_t steps() const { return steps_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }

  /// Opens the next update, for which the rates of this moment hold; update() is then called once for every
  /// element.
  void begin_step() { ++steps_, used_ = hyper_; }
  /// Takes begin_step() back while nothing was updated yet.
  void abandon_step() { --steps_; }
  /// lr() of the last begin_step().
  std::vector<double> used_lr() const { return {used_.lr}; }
  /// Gradients times `factor` → moments → masters → compute parameters, in one pass: by the GPU where all of
  /// them lie there, else by the processor. False when an updated weight or moment is NaN or infinite, as far
  /// as that is known at once.
  bool update(const UpdateView& view, double factor, tensor::Kernels& kernels);
  /// Says that `view` is updated after those announced before it, with gradients that are complete, and
  /// parameters that work no longer reads, from `ready` on: beside a GPU its states begin to come to the
  /// processor. Its tensors last until end_series().
  void announce(const UpdateView& view, const device::Event& ready, tensor::Kernels& kernels);
  /// Work that the device is given from now on sees what was updated so far.
  void join();
  /// join(), and forgets what was announced and not updated.
  void end_series() noexcept;
  /// Waits for what update() gave to a GPU since the last call, not for later work; false when any of it
  /// became NaN or infinite.
  bool finite();

 private:
  struct OnGpu;
  optim::SpanUpdate span_of(const UpdateView& view, const sharding::Piece& piece, double factor) const;
  OnGpu& on_gpu(device::Device& device);

  optim::Hyper hyper_, used_;  ///< of the coming step, and of the open one
  optim::Description description_;
  std::vector<std::string> names_;  ///< of its states
  std::uint64_t seed_;
  std::optional<double> own_lr_;
  std::int64_t steps_ = 0;
  std::shared_ptr<OnGpu> gpu_;  ///< what updates on or beside a GPU need; null on CPUs
};

/// Moves an optimizer's learning rate (and betas, for OneCycle) along a schedule (optim/lr_schedule.h).
class Scheduler {
 public:
  /// Sets the rate of the first step.
  Scheduler(optim::LrSchedule schedule, std::shared_ptr<Optimizer> optimizer);

  /// After every applied optimizer step.
  void step();
  std::vector<double> get_lr() const { return {schedule_.get_lr()}; }
  std::int64_t last_batch_iteration() const { return schedule_.last_batch_iteration(); }
  std::string save() const { return schedule_.save(); }
  void restore(const std::string& saved);

 private:
  void apply();

  optim::LrSchedule schedule_;
  std::shared_ptr<Optimizer> optimizer_;
};

/// The schedule of the config's `scheduler` section; null without one.
std::shared_ptr<Scheduler> make_scheduler(const config::Config& config,
                                          const std::shared_ptr<Optimizer>& optimizer);

}  // namespace sherd::engine

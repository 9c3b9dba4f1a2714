#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "config/optimizer.h"

namespace sherd::optim {

/// The values that a schedule sets for one optimizer step.
struct SchedulePoint {
  double lr = 0;
  std::optional<std::pair<double, double>> betas;  ///< OneCycle with momentum only
  bool operator==(const SchedulePoint&) const = default;
};

/// The five schedules of DeepSpeed 0.19, and three of transformers'. The position t starts at −1; step()
/// moves it by one after every *applied* optimizer step, so that optimizer step i (from 0) runs at t = i − 1.
/// N = max(2, warmup_num_steps).
///
/// - LRRangeTest: min_lr·(1 + step_rate·x), x = (t+1)/step_size, floored with a staircase.
/// - WarmupLR: min + (max − min)·γ, γ = ln(t+1)/ln N (log) or t/N (linear) while t < N, then 1; min at t =
///   −1.
/// - WarmupDecayLR: the same while t < N, then γ = max(0, (total − t)/max(1, total − N)).
/// - WarmupCosineLR: lr·ρ; ρ = r₀ + (1 − r₀)·γ while t < N, then c + (1 − c)·(1 + cos(π·s))/2 with
///   s = min(1, (t − N + 1)/max(1, total − N)); 0 at t = −1.
/// - OneCycle (Smith, "A disciplined approach to neural network hyper-parameters", 2018): up from min to max
///   over the first steps, down over the second, optionally in stairs; β1 moves the other way and β2 is 0.99;
///   afterwards min/(1 + decay_lr_rate·d/decay_step_size) and β1 = max_mom·(1 +
///   decay_mom_rate·d/decay_step_size), kept below 1.
/// - linear, cosine, constant_with_warmup: transformers', at step i = t + 1: lr·i/W while i < W =
///   warmup_num_steps, then lr·(total − i)/max(1, total − W), lr·(1 + cos(π·(i − W)/max(1, total − W)))/2,
///   both 0 from step total on, or lr.
///
/// A plain value; not synchronised.
class LrSchedule {
 public:
  /// `base_lr`: the optimizer's own rate. `has_betas`: OneCycle may cycle momentum. A monostate holds base_lr
  /// for ever.
  LrSchedule(config::Scheduler scheduler, double base_lr, bool has_betas);

  /// The values at position t ≥ −1; a pure function.
  SchedulePoint at(std::int64_t t) const;
  SchedulePoint current() const { return at(last_batch_iteration_); }
  /// The rate of parameters with base_lr; others keep their proportion to it (engine/update/optimizer.h).
  double get_lr() const { return current().lr; }
  void step() { ++last_batch_iteration_; }

  std::int64_t last_batch_iteration() const { return last_batch_iteration_; }

  /// The position as text that restore() reads. Throws Error{data} for other text.
  std::string save() const;
  void restore(const std::string& saved);

 private:
  config::Scheduler scheduler_;
  double base_lr_;
  bool has_betas_;
  std::int64_t last_batch_iteration_ = -1;
};

}  // namespace sherd::optim

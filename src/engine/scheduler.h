#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/update/optimizer.h"
#include "optim/lr_schedule.h"

namespace sherd::engine {

/// Moves an optimizer's learning rates (and betas, for OneCycle) along a schedule (optim/lr_schedule.h). The
/// schedule is that of group 0; a group whose configured rate is another multiple of it keeps its proportion:
/// lr_g(t) = schedule(t)·lr_g/lr_0. (DeepSpeed's WarmupLR gives all groups the same rates where its own are
/// no lists.)
class Scheduler {
 public:
  /// Sets the rates of the first step. Throws Error{config} where the rates have no proportions: group 0's is
  /// 0, and another's is not.
  Scheduler(optim::LrSchedule schedule, std::shared_ptr<Optimizer> optimizer);

  /// After every applied optimizer step.
  void step();
  /// One per parameter group, as the schedule has them.
  std::vector<double> get_lr() const;
  std::int64_t last_batch_iteration() const { return schedule_.last_batch_iteration(); }
  std::string save() const { return schedule_.save(); }
  void restore(const std::string& saved);

 private:
  void apply();

  optim::LrSchedule schedule_;
  std::shared_ptr<Optimizer> optimizer_;
  std::vector<double> proportions_;
};

/// The schedule of the config's `scheduler` section; null without one.
std::shared_ptr<Scheduler> make_scheduler(const config::Config& config,
                                          const std::shared_ptr<Optimizer>& optimizer);

}  // namespace sherd::engine

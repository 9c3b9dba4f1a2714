#include "engine/scheduler.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace sherd::engine {

Scheduler::Scheduler(optim::LrSchedule schedule, std::shared_ptr<Optimizer> optimizer)
    : schedule_(std::move(schedule)),
      optimizer_(std::move(optimizer)),
      proportions_(optimizer_->lr_proportions()) {
  if (!std::all_of(proportions_.begin(), proportions_.end(), [](double x) { return std::isfinite(x); }))
    fail(ErrorKind::config,
         "a parameter group's rate keeps its proportion to optimizer.params.lr under a scheduler, ",
         "and that is 0: give it a rate, or drop the scheduler");
  apply();
}

std::vector<double> Scheduler::get_lr() const {
  std::vector<double> out = proportions_;
  for (double& lr : out) lr *= schedule_.get_lr();
  return out;
}

void Scheduler::step() {
  schedule_.step();
  apply();
}

void Scheduler::restore(const std::string& saved) {
  schedule_.restore(saved);
  apply();
}

void Scheduler::apply() {
  optimizer_->follow(get_lr(), schedule_.current().betas);
}

std::shared_ptr<Scheduler> make_scheduler(const config::Config& config,
                                          const std::shared_ptr<Optimizer>& optimizer) {
  if (std::holds_alternative<std::monostate>(config.scheduler)) return nullptr;
  const auto has_betas = [](const config::OptimizerRule& rule) { return rule.betas() != nullptr; };
  const bool betas = has_betas(config.optimizer) ||
                     std::any_of(config.optimizer.groups.begin(), config.optimizer.groups.end(), has_betas);
  return std::make_shared<Scheduler>(optim::LrSchedule(config.scheduler, config.optimizer.lr, betas),
                                     optimizer);
}

}  // namespace sherd::engine

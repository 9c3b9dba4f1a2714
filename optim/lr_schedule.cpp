#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace sherd::optim {
namespace {

constexpr double cycled_beta2 = 0.99;
// A momentum that decays upwards would pass 1, where Adam's bias correction divides by zero.
constexpr double largest_beta1 = 0.99999;

double warmup_gamma(config::WarmupType type, std::int64_t t, std::int64_t steps) {
  if (type == config::WarmupType::linear) return static_cast<double>(t) / static_cast<double>(steps);
  return std::log(static_cast<double>(t + 1)) / std::log(static_cast<double>(steps));
}

struct Evaluate {
  std::int64_t t;
  double base_lr;
  bool has_betas;

  SchedulePoint operator()(std::monostate) const { return {base_lr, {}}; }

  SchedulePoint operator()(const config::LrRangeTest& s) const {
    double x = static_cast<double>(t + 1) / static_cast<double>(s.step_size);
    if (s.staircase) x = std::floor(x);
    return {s.min_lr * (1 + s.step_rate * x), {}};
  }

  SchedulePoint operator()(const config::Warmup& s) const {
    const double max_lr = s.warmup_max_lr.value_or(base_lr);
    return {s.warmup_min_lr + (max_lr - s.warmup_min_lr) * gamma(s), {}};
  }

  double gamma(const config::Warmup& s) const {
    const std::int64_t steps = std::max<std::int64_t>(2, s.warmup_num_steps), total = s.total_num_steps;
    if (t < 0) return 0;
    if (t < steps) return warmup_gamma(s.warmup_type, t, steps);
    if (total == 0) return 1;
    return std::max(
        0.0, static_cast<double>(total - t) / static_cast<double>(std::max<std::int64_t>(1, total - steps)));
  }

  SchedulePoint operator()(const config::WarmupCosine& s) const { return {base_lr * ratio(s), {}}; }

  double ratio(const config::WarmupCosine& s) const {
    const std::int64_t steps = std::max<std::int64_t>(2, s.warmup_num_steps);
    if (t < 0) return 0;
    if (t < steps)
      return s.warmup_min_ratio + (1 - s.warmup_min_ratio) * warmup_gamma(s.warmup_type, t, steps);
    const std::int64_t span = std::max<std::int64_t>(1, s.total_num_steps - steps);
    const double progress = std::min(1.0, static_cast<double>(t - steps + 1) / static_cast<double>(span));
    return std::max(
        0.0, s.cos_min_ratio + (1 - s.cos_min_ratio) * (1 + std::cos(std::numbers::pi * progress)) / 2);
  }

  SchedulePoint operator()(const config::TrainerSchedule& s) const { return {base_lr * factor(s), {}}; }

  double factor(const config::TrainerSchedule& s) const {
    const auto step = static_cast<double>(t + 1), warmup = static_cast<double>(s.warmup_num_steps);
    const auto total = static_cast<double>(s.total_num_steps);
    if (step < warmup) return step / std::max(1.0, warmup);
    if (s.shape == config::RateShape::constant_with_warmup) return 1;
    if (s.shape == config::RateShape::linear)
      return std::max(0.0, (total - step) / std::max(1.0, total - warmup));
    // Beyond the last step transformers' cosine would rise again.
    const double progress = std::min(1.0, (step - warmup) / std::max(1.0, total - warmup));
    return std::max(0.0, 0.5 * (1 + std::cos(std::numbers::pi * progress)));
  }

  SchedulePoint operator()(const config::OneCycle& s) const {
    const bool momentum = s.cycle_momentum && has_betas;
    const auto point = [&](double lr, double beta1) {
      SchedulePoint out{lr, {}};
      if (momentum) out.betas = {std::min(beta1, largest_beta1), cycled_beta2};
      return out;
    };
    if (t < 0) return point(s.cycle_min_lr, s.cycle_min_mom);
    const std::int64_t total = s.cycle_first_step_size + s.cycle_second_step_size;
    if (t < total) {
      const double scale = cycle_scale(s, total);
      return point(s.cycle_min_lr + (s.cycle_max_lr - s.cycle_min_lr) * scale,
                   s.cycle_max_mom - (s.cycle_max_mom - s.cycle_min_mom) * scale);
    }
    const double decays = s.decay_step_size == 0
                              ? 0.0
                              : static_cast<double>(t - total + 1) / static_cast<double>(s.decay_step_size);
    return point(s.cycle_min_lr / (1 + s.decay_lr_rate * decays),
                 s.cycle_max_mom * (1 + s.decay_mom_rate * decays));
  }

  // The height in the cycle, 0 to 1. Counted in steps rather than fractions of the cycle, so that peaks and
  // stairs are hit exactly.
  double cycle_scale(const config::OneCycle& s, std::int64_t total) const {
    const std::int64_t at = (t + 1) % total;
    const bool rising = at <= s.cycle_first_step_size;
    const std::int64_t position = rising ? at : total - at;
    const std::int64_t half = rising ? s.cycle_first_step_size : s.cycle_second_step_size;
    const std::int64_t stairs = rising ? s.cycle_first_stair_count : s.cycle_second_stair_count;
    if (stairs > 0) return static_cast<double>(position * stairs / half) / static_cast<double>(stairs);
    return static_cast<double>(position) / static_cast<double>(half);
  }
};

}  // namespace

LrSchedule::LrSchedule(config::Scheduler scheduler, double base_lr, bool has_betas)
    : scheduler_(std::move(scheduler)), base_lr_(base_lr), has_betas_(has_betas) {}

SchedulePoint LrSchedule::at(std::int64_t t) const {
  require(t >= -1, "a schedule's position is -1 or more, not ", t);
  return std::visit(Evaluate{t, base_lr_, has_betas_}, scheduler_);
}

std::string LrSchedule::save() const {
  return std::to_string(last_batch_iteration_);
}

void LrSchedule::restore(const std::string& saved) {
  std::size_t end = 0;
  std::int64_t t = -2;
  try {
    t = std::stoll(saved, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  if (end == 0 || end != saved.size() || t < -1)
    fail(ErrorKind::data, "\"", saved,
         "\" is no saved schedule; the checkpoint is damaged or of another program");
  last_batch_iteration_ = t;
}

}  // namespace sherd::optim

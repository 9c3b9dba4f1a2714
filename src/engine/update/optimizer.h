#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "config/config.h"
#include "engine/update/rule_update.h"
#include "optim/description.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// The rules that update a model (optim/), one for each parameter group, with their hyper-parameters and the
/// count of steps; the states live with the segments, and RuleUpdate says what is done to them. Used from the
/// rank's thread.
class Optimizer {
 public:
  /// `seed`: of the stochastic rounding of 16-bit states. `group_of`: of the parameters that are not in group
  /// 0.
  Optimizer(const config::Optimizer& config, std::uint64_t seed, GroupOf group_of = {});
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Parameter groups: 0 is that of the section itself, then follow those of `optimizer.groups`.
  int groups() const { return static_cast<int>(hyper_.size()); }
  /// The groups' rules, each once: what they keep and need. Groups of one rule share segments, whatever their
  /// rates.
  const std::vector<optim::Description>& rules() const { return rules_; }
  /// How a model is sharded that this is to update: with a segment's worth of states for each of rules().
  sharding::ShardingOptions sharding_options(const config::Config& config) const;

  /// Learning rates, one per parameter group.
  std::vector<double> lr() const { return rates_of(hyper_); }
  /// Sets the rate of all groups, or of one. Holds from the next step on until a scheduler moves; checkpoints
  /// keep it. Throws Error{usage} where there is no such group.
  void set_lr(double lr);
  void set_lr(int group, double lr);
  /// The rates that set_lr() was given, by group, unless a scheduler has moved since.
  const std::vector<std::optional<double>>& own_lr() const { return own_lr_; }
  /// The rates of the configuration.
  void reset_lr();
  /// The configuration's rate of each group, as a multiple of that of group 0; exactly 1 where they are
  /// equal. Infinite where group 0's is 0.
  std::vector<double> lr_proportions() const;
  /// The rates of a schedule, and its betas, which go to all groups.
  void follow(const std::vector<double>& lr, const std::optional<std::pair<double, double>>& betas);

  /// Updates applied so far; the rule's bias correction counts from it.
  std::int64_t steps() const { return context_.step; }
  void set_steps(std::int64_t steps) { context_.step = steps; }

  // ---- an update ----
  /// Opens the next step, for which the rates of this moment hold. `norm`: of all gradients, as they are
  /// multiplied with the factor of passes; for rules that measure.
  void begin_step(double norm = 0);
  /// Takes begin_step() back while nothing was updated yet.
  void abandon_step() { --context_.step; }
  /// lr() of the last begin_step().
  std::vector<double> used_lr() const { return rates_of(context_.hyper); }
  /// How the segment is updated.
  RuleUpdate& update_of(const sharding::Segment& segment) const {
    return *updates_[static_cast<std::size_t>(segment.key().rule)];
  }
  /// Where passes are made.
  PassRunner& passes() { return context_.passes; }
  /// All has been measured that rules measure: what their last passes take is known. Collective over all
  /// ranks of the model.
  void agree(sharding::ShardedModel& model, device::Device& device);
  /// Forgets what is left of an update, whole or abandoned.
  void end_step() noexcept;
  /// Waits for what passes gave to a GPU since the last call, not for later work; false when any of it became
  /// NaN or infinite.
  bool finite() { return context_.passes.finite(); }

  // ---- what rules keep beside states ----
  /// Whether replicas keep gradients of this segment to themselves in step number `step`, and exchange
  /// momentum.
  bool exchanges_momentum(const sharding::Segment& segment, std::int64_t step) const;
  /// After how many steps all rules exchange momentum that do so for some part of the model; none do:
  /// nothing.
  std::optional<std::int64_t> freeze_step(const sharding::ShardedModel& model) const;
  /// Takes the memory that exchanges will need.
  void prepare(const sharding::ShardedModel& model, device::Device& device);
  /// Gives back all memory of rules, before the device goes; no update follows.
  void release() { updates_.clear(); }
  /// The memory of whole parameters, for checkpoints: see ParameterNorms::save(), restore().
  ParameterNorms& norms() { return *norms_; }

 private:
  static std::vector<double> rates_of(const std::vector<optim::Hyper>& groups);
  const optim::Description& rule_of(const sharding::Segment& segment) const {
    return rules_[static_cast<std::size_t>(segment.key().rule)];
  }

  std::vector<optim::Hyper> configured_, hyper_;  ///< by group: of the configuration, and of the coming step
  std::vector<optim::Description> rules_;
  std::vector<int> rule_of_group_;
  std::vector<std::optional<double>> own_lr_;
  std::shared_ptr<ParameterNorms> norms_;
  UpdateContext context_;
  std::vector<std::unique_ptr<RuleUpdate>> updates_;  ///< by rule
};

}  // namespace sherd::engine

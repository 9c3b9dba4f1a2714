#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "config/config.h"
#include "device/stream.h"
#include "engine/update/momentum_exchange.h"
#include "engine/update/parameter_groups.h"
#include "engine/update/parameter_norms.h"
#include "engine/update/whole_matrices.h"
#include "optim/description.h"
#include "optim/update_rule.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// All states of a stretch of a segment in memory, from flat element `begin` on; `masters` as the segment's
/// form says, undefined where the parameters are the masters.
struct UpdateView {
  const sharding::Segment* segment = nullptr;
  std::int64_t begin = 0;
  tensor::Tensor parameters, gradients, masters;
  std::vector<tensor::Tensor> moments;
  std::vector<tensor::Tensor> scales;  ///< of moments in codes, by moment: of their blocks; else undefined

  std::int64_t end() const { return begin + gradients.numel(); }
  /// Flat elements [from, to) of it.
  UpdateView part(std::int64_t from, std::int64_t to) const;
};

/// Applies update rules (optim/), one for each parameter group, to the flat segments that this rank updates.
/// Holds the hyper-parameters and the count of steps; the states live with the segments. Used from the rank's
/// thread.
class Optimizer {
 public:
  /// `seed`: of the stochastic rounding of 16-bit states. `group_of`: of the parameters that are not in group
  /// 0.
  Optimizer(const config::Optimizer& config, std::uint64_t seed, GroupOf group_of = {});

  /// Parameter groups: 0 is that of the section itself, then follow those of `optimizer.groups`.
  int groups() const { return static_cast<int>(hyper_.size()); }
  /// What the groups' rules keep and need, each once. Groups of one rule share segments, whatever their
  /// rates.
  const std::vector<optim::Description>& rules() const { return rules_; }
  /// How a model is sharded that this is to update: with a segment's worth of states for each of rules().
  sharding::ShardingOptions sharding_options(const config::Config& config) const;

  /// Learning rates, one per parameter group.
  std::vector<double> lr() const { return rates_of(hyper_); }
  /// Of all groups, or of one. Holds from the next step on until a scheduler moves; checkpoints keep it.
  /// Throws Error{usage} where there is no such group.
  void set_lr(double lr);
  void set_lr(int group, double lr);
  /// What set_lr() was given, by group, unless a scheduler has moved since.
  const std::vector<std::optional<double>>& own_lr() const { return own_lr_; }
  /// The rates of the configuration.
  void reset_lr();
  /// The configuration's rate of each group, as a multiple of that of group 0; exactly 1 where they are
  /// equal. Infinite where group 0's is 0.
  std::vector<double> lr_proportions() const;
  /// The rates of a schedule, and its betas, which go to all groups.
  void follow(const std::vector<double>& lr, const std::optional<std::pair<double, double>>& betas);

  /// Updates applied so far; the rule's bias correction counts from it.
  std::int64_t steps() const { return steps_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }

  /// Some rule asks for norms of whole parameters, and maybe of all gradients, before it updates anything.
  bool measures() const;
  /// In step number `step` replicas keep gradients of this segment to themselves, and exchange momentum.
  bool exchanges_momentum(const sharding::Segment& segment, std::int64_t step) const {
    return rule_of(segment).exchanges_momentum(step) && segment.can_exchange_momentum();
  }
  /// After how many steps all rules exchange momentum that do so for some part of the model; none do:
  /// nothing.
  std::optional<std::int64_t> freeze_step(const sharding::ShardedModel& model) const;
  /// Takes the memory that exchanging momentum of these segments will need, where any of them can.
  void prepare_exchanges(const std::vector<sharding::Segment*>& segments, device::Device& device);
  /// Gives that back, before the device goes.
  void end_exchanges() { momentum_ = {}; }
  /// Opens the next update, for which the rates of this moment hold; update() is then called once for every
  /// element. `norm`: of all gradients, as they are multiplied with update()'s factor; for rules that
  /// measure.
  void begin_step(double norm = 0);
  /// Takes begin_step() back while nothing was updated yet.
  void abandon_step() { --steps_; }
  /// lr() of the last begin_step().
  std::vector<double> used_lr() const { return rates_of(used_); }
  /// Gradients times `factor` → moments → masters → compute parameters, in one pass: by the GPU where all of
  /// them lie there, else by the processor. False when an updated weight or moment is NaN or infinite, as far
  /// as that is known at once.
  bool update(const UpdateView& view, double factor, tensor::Kernels& kernels);
  /// Of rules that measure, before the first update() of such a rule: every view that update() is going to
  /// have, with the same factor. Changes nothing.
  void measure(const UpdateView& view, double factor, tensor::Kernels& kernels);
  /// All has been measured: what update() takes is known. Collective over all ranks of the model.
  void share_norms(sharding::ShardedModel& model, device::Device& device);
  /// Of segments that exchange momentum, before update(), every view that that is going to have: packs what
  /// replicas send, with the same factor.
  void compress(const UpdateView& view, double factor, tensor::Kernels& kernels);
  /// All of the segment has been compressed: replicas agree. Collective over them.
  void exchange_momentum(sharding::Segment& segment, tensor::Kernels& kernels);
  /// Of 1-bit LAMB behind its freeze_step, before update(), every view that that is going to have: takes the
  /// momentum of the step, refreshes the variance, and measures.
  void refresh(const UpdateView& view, double factor, tensor::Kernels& kernels);
  /// Of whole parameters, for checkpoints: see ParameterNorms::save(), restore().
  ParameterNorms& norms() { return norms_; }
  /// Of rules that take matrices, before the first update() of such a view: its momenta are updated, and what
  /// they give is kept. Returns as update() does.
  bool make_directions(const UpdateView& view, double factor, tensor::Kernels& kernels);
  /// Orthogonalises what make_directions() has kept since the last call, of whole segments: update() of their
  /// views takes it. Collective over the ranks that share these.
  void orthogonalize(tensor::Kernels& kernels);
  /// Says that `view` is updated, or measured, after those announced before it, with gradients that are
  /// complete, and parameters that work no longer reads, from `ready` on: beside a GPU its states begin to
  /// come to the processor. Its tensors last until end_series().
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
  static std::vector<double> rates_of(const std::vector<optim::Hyper>& groups);
  std::size_t group_of(const autograd::Parameter& parameter) const;
  optim::SpanUpdate span_of(const UpdateView& view, const sharding::Piece& piece, double factor) const;
  const PackedMomentum* agreed_of(const sharding::Segment& segment, device::Device& device);
  template <class Visit>
  void for_each_agreed(const PackedMomentum& momentum, const UpdateView& view, const optim::SpanUpdate& span,
                       std::int64_t begin, const Visit& visit) const;
  void refresh_span(const PackedMomentum* momentum, const UpdateView& view, const optim::SpanUpdate& span,
                    std::int64_t begin, const optim::Hyper& hyper, bool first, tensor::Kernels& kernels,
                    optim::NormSums& sums) const;
  template <class Visit>
  void for_each_span_of(const UpdateView& view, const sharding::Piece& piece, double factor,
                        const Visit& visit) const;
  /// Calls visit(parameter group, span, its first flat element) for what is updated at once of each parameter
  /// in the view.
  template <class Visit>
  void for_each_span(const UpdateView& view, double factor, const Visit& visit) const;
  /// The same of rules that measure, by published tensors, whose trust ratios spans have: visit(parameter
  /// group, MeasuredTensor, span, its first flat element).
  template <class Visit>
  void for_each_tensor_span(const UpdateView& view, double factor, const Visit& visit) const;
  /// The same of rules that take matrices, whose orthogonal directions are the gradients. `kept`: of the
  /// segment.
  template <class Visit>
  void for_each_matrix_span(const UpdateView& view, const tensor::Tensor& kept, const Visit& visit) const;
  const optim::Description& rule_of(const sharding::Segment& segment) const;
  bool move_weights(const UpdateView& view, double factor, tensor::Kernels& kernels);
  OnGpu& on_gpu(device::Device& device);
  const tensor::Tensor& kept_directions(const sharding::Segment& segment, device::Device& device);

  std::vector<optim::Hyper> configured_;    ///< by group
  std::vector<optim::Hyper> hyper_, used_;  ///< likewise: of the coming step, and of the open one
  std::vector<optim::Hyper> moves_;  ///< by which weights move in the open one: optim::step_rule() of Muon's
  std::vector<optim::Description> rules_;
  std::vector<int> rule_of_group_;
  GroupOf group_of_;
  std::uint64_t seed_;
  std::vector<std::optional<double>> own_lr_;
  std::int64_t steps_ = 0;
  double norm_ = 0;  ///< of the open step's gradients
  ParameterNorms norms_;
  MomentumExchange momentum_;
  WholeMatrices matrices_;
  std::shared_ptr<OnGpu> gpu_;  ///< what updates on or beside a GPU need; null on CPUs
};

}  // namespace sherd::engine

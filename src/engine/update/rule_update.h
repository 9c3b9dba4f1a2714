#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/update/parameter_groups.h"
#include "engine/update/pass_runner.h"
#include "optim/update_rule.h"

namespace sherd::engine {

/// The facts of the update under way, whatever the rules.
struct UpdateContext {
  std::uint64_t seed = 0;  ///< for the stochastic rounding of 16-bit states
  GroupOf group_of;        ///< parameters that are not in group 0
  std::int64_t step = 0;   ///< number of the open step, and of updates so far; bias correction counts from it
  std::vector<optim::Hyper> hyper;  ///< as the open step uses them, by parameter group
  double norm = 0;                  ///< the open step's gradient norm, times the passes' factor
  PassRunner passes;

  std::size_t group(const autograd::Parameter& parameter) const;
};

/// How the segments of one rule are updated, as the pipeline asks for it: by passes over views of their
/// states, and by exchanges between ranks. This class is all of it for rules with one pass, which takes each
/// element by itself (SGD, Adam, AdamW, 8-bit AdamW, Lion, Adagrad). Rules that need more are a class each in
/// engine/update/rules/, which make_rule_update() chooses: norms of parameters (LAMB, LARS), whole matrices
/// (Muon), momentum of replicas (1-bit Adam), and both norms and momentum (1-bit LAMB).
class RuleUpdate {
 public:
  /// `context` must outlive it.
  RuleUpdate(const optim::Description& rule, UpdateContext& context) : rule_(rule), context_(context) {}
  virtual ~RuleUpdate() = default;
  RuleUpdate(const RuleUpdate&) = delete;
  RuleUpdate& operator=(const RuleUpdate&) = delete;

  // ---- what is read before a pass, and written after it ----
  enum class Access : std::uint8_t { read, write };
  /// Whether this phase of the chunk reads, or writes, the state; the weights where that is null.
  virtual bool moves(const UpdateChunk& /*chunk*/, optim::Phase /*phase*/, const optim::State* /*state*/,
                     Access /*access*/) const {
    return true;
  }

  // ---- what is done ----
  /// Takes the memory for good that the segment's exchanges will need.
  virtual void prepare(const sharding::Segment& /*segment*/, device::Device& /*device*/) {}
  /// Opens a step: forgets what one that was abandoned has left.
  virtual void begin_step() {}
  /// Makes the pass of this phase over a view, each element once a step; gradients are multiplied by
  /// `factor`. False when an updated weight or state is NaN or infinite, as far as that is known at once.
  virtual bool pass(optim::Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels);
  /// Makes the exchange of this phase: of the numbers that passes have left for the segment, or for its
  /// batch. Collective over the ranks that share them.
  virtual void exchange(optim::Phase phase, sharding::Segment& segment, tensor::Kernels& kernels);
  /// Ends a step, whole or abandoned.
  virtual void end_step() noexcept {}

 protected:
  /// Takes a span of a parameter that is updated at once: its rule, the span, and its first flat element.
  using SpanVisit = std::function<void(const optim::Hyper&, optim::SpanUpdate&, std::int64_t begin)>;

  const optim::Description& rule() const { return rule_; }
  UpdateContext& context() const { return context_; }
  /// Calls visit for the spans of a view that the elementwise pass updates.
  virtual void for_each_span(const UpdateView& view, double factor, const SpanVisit& visit) const;
  /// The factor of a segment's gradients, where that of the step is `factor`.
  virtual double factor_of(const sharding::Segment& /*segment*/, const optim::Hyper& /*hyper*/,
                           double factor) const {
    return factor;
  }
  /// Gradients times `factor` → moments → masters → compute parameters.
  bool move_weights(const UpdateView& view, double factor, tensor::Kernels& kernels);

  /// Calls visit for the spans of a part of a view that is of one parameter: all of it, but where moments are
  /// rounded by the element's place in the whole parameter, of which there is a slice.
  void for_each_run(const UpdateView& view, const sharding::Piece& piece, double factor,
                    const SpanVisit& visit) const;
  optim::SpanUpdate span_of(const UpdateView& view, const sharding::Piece& piece, double factor) const;

 private:
  const optim::Description rule_;
  UpdateContext& context_;
};

class ParameterNorms;
class WholeMatrices;

/// The parts that rules of one optimizer share: norms are added up once for all, and matrices of neighbouring
/// segments exchanged together, whatever their rules.
struct SharedByRules {
  std::shared_ptr<ParameterNorms> norms;
  std::shared_ptr<WholeMatrices> matrices;
};

std::unique_ptr<RuleUpdate> make_rule_update(const optim::Description& rule, UpdateContext& context,
                                             const SharedByRules& shared);

}  // namespace sherd::engine

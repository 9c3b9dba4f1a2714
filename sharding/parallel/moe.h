#pragma once

#include <memory>
#include <vector>

#include "sharding/parallel/experts.h"

namespace sherd::parallel {

/// A layer of experts.
struct MoeOptions : ExpertOptions {
  tensor::Routing routing;
  autograd::RouterLosses losses;
  /// An expert takes at most ⌈tokens·top_k/experts · this⌉ choices of a micro-batch, others are dropped: that
  /// part of the token's output is 0. 0: all are taken.
  double capacity_factor = 0;
  Drop drop = Drop::by_weight;
};

/// What routers have done since they were asked last, on this rank.
struct RoutingTotals {
  std::vector<std::int64_t> per_expert;  ///< choices of each expert, before any were dropped
  std::int64_t choices = 0, dropped = 0;
  std::int64_t micro_batches = 0;
  double balance = 0, z = 0;  ///< sums over micro-batches of the losses, without their factors
};

/// Experts, feed-forward networks of which a router chooses a few for each token, and adds up what they make
/// of it by the weights of the choice (Shazeer et al. 2017, "Outrageously large neural networks").
///
/// Parameters: "router.weight" [experts, hidden], which all ranks have, and "experts" (Experts). x and the
/// result: this rank's part of the stream, [..., hidden] (Layout). Losses and capacities are those of the
/// micro-batch's tokens on all tensor and context ranks. Expert ranks exchange the rows of chosen tokens.
class Moe : public nn::Layer {
 public:
  /// Throws Error{config} for options that do not fit each other.
  explicit Moe(const MoeOptions& options, const Layout& layout = {});
  const MoeOptions& options() const { return options_; }
  /// Takes what was counted in training since the last call.
  RoutingTotals take_totals();

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  void count(Tape& tape, const Var& logits, const autograd::Routed& routed, std::int64_t dropped);

  std::vector<bool> dropped(Tape& tape, const autograd::Routed& routed, std::int64_t tokens) const;

  MoeOptions options_;
  Layout layout_;
  std::shared_ptr<nn::Linear> router_;
  std::shared_ptr<Experts> experts_;
  RoutingTotals totals_;
};

/// Choices that an expert takes; see MoeOptions::capacity_factor. -1: all.
std::int64_t expert_capacity(const MoeOptions& options, std::int64_t tokens);

}  // namespace sherd::parallel

#pragma once

// This folder holds mixture-of-experts layers: a router, the way of tokens to experts and back, and the
// experts.
//
// To change, look at:
// - which experts one token takes: tensor/routing_row.h; balance losses: router_losses.h; capacities, biases
//   and the layer: moe.cpp
// - which rows experts compute, and on which rank: dispatch.cpp decides, experts.cpp sends and computes; rows
//   on the tape: autograd/expert_rows.cpp
// - what routers learn once per step outside of gradients: nn/step_state.h

#include <memory>
#include <string>
#include <vector>

#include "nn/step_state.h"
#include "sharding/parallel/experts/experts.h"
#include "sharding/parallel/experts/router_losses.h"

namespace sherd::parallel {

/// A layer of experts.
struct MoeOptions : ExpertOptions {
  tensor::Routing routing;
  bool router_bias = false;  ///< the router's logits have one
  RouterLosses losses;
  /// Where the losses are those of all layers together (BalanceLoss::pooled): what these share.
  std::shared_ptr<PooledChoices> pooled;
  /// An expert takes at most ⌈tokens·top_k/experts · this⌉ choices of a micro-batch, others are dropped: that
  /// part of the token's output is 0. 0: all are taken.
  double capacity_factor = 0;
  Drop drop = Drop::by_weight;
  /// In training a router's input is multiplied by numbers of [1 − jitter, 1 + jitter].
  double jitter = 0;
  /// Whether there is a bias per expert, which counts for the choice alone.
  bool correction_bias = false;
  /// The distance that the bias moves with each step: up where the expert had less than the mean of the
  /// step's choices, down where it had more (Wang et al. 2024, "Auxiliary-loss-free load balancing"). More
  /// than 0: there is a bias.
  double bias_update = 0;
};

/// Counts of what a router has done: on this rank so far, or on all in a step.
struct RoutingTotals {
  std::vector<std::int64_t> per_expert;  ///< choices of each expert, before any were dropped
  std::int64_t choices = 0, dropped = 0;
  std::int64_t micro_batches = 0;  ///< counted by the first of the ranks that share one
  /// Sums of the losses over micro-batches, without their factors; ranks that share a micro-batch have
  /// shares. The pooled loss is the mean of its layers' numbers.
  double balance = 0, z = 0;

  /// The most loaded expert's choices over the mean; 0 without choices.
  void add(const RoutingTotals& more);
  double imbalance() const;
  double dropped_share() const;
};

/// Experts, feed-forward networks of which a router chooses a few for each token, and adds up what they make
/// of it by the weights of the choice (Shazeer et al. 2017, "Outrageously large neural networks").
///
/// Parameters: "router.weight" [experts, hidden] and where asked "router.bias", which all ranks have, and
/// "experts" (Experts). x and the
/// result: this rank's part of the stream, [..., hidden] (Layout). Losses and capacities are those of the
/// micro-batch's tokens on all tensor and context ranks. Expert ranks exchange the rows of chosen tokens.
/// Filling at the end of sequences (Tape::filling) is no token: it takes no expert, the result is 0 there,
/// and it counts nowhere.
class Moe : public nn::Layer, public nn::StepState {
 public:
  /// Throws Error{config} for options that do not fit each other.
  explicit Moe(const MoeOptions& options, const Layout& layout = {});
  const MoeOptions& options() const { return options_; }
  /// Takes what was counted in training since the last call, or the end of a step.
  RoutingTotals take_totals();
  /// The totals of all ranks and micro-batches in the step that ended last.
  const RoutingTotals& last_step() const { return last_step_; }
  /// One number for each expert; empty where there is none.
  const std::vector<float>& bias() const { return bias_; }

  std::vector<double> counted() const override;
  void end_step(std::span<const double> sums, bool applied) override;
  void drop_step() override;
  std::vector<float> saved() const override { return bias_; }
  void restore(std::span<const float> values) override;

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  struct MicroBatch;

  Var router_input(Tape& tape, const Var& rows, const tensor::Shape& inner) const;
  tensor::Tensor bias_tensor(Tape& tape, DType dtype) const;
  std::vector<bool> filling_of(const Tape& tape, const tensor::Shape& inner) const;
  std::int64_t tokens_of(const Tape& tape, std::int64_t rows) const;
  autograd::Routed route(Tape& tape, const Var& logits, const std::vector<bool>& filling);
  autograd::RouterLossFactors loss_factors(const MicroBatch& of);
  std::vector<double> balance_weights(const MicroBatch& of) const;
  void count(Tape& tape, const Var& logits, const autograd::Routed& routed, const std::vector<bool>& filling,
             MicroBatch& of);
  std::vector<std::int64_t> over_context(Tape& tape, std::vector<std::int64_t> counts) const;
  Dispatch dispatch(Tape& tape, const autograd::Routed& routed, const tensor::Shape& inner) const;
  std::vector<bool> dropped(Tape& tape, const autograd::Routed& routed, const tensor::Shape& inner,
                            std::int64_t capacity) const;

  MoeOptions options_;
  Layout layout_;
  int layer_ = 0;  ///< number among the layers that share options_.pooled
  std::shared_ptr<nn::Linear> router_;
  std::shared_ptr<Experts> experts_;
  std::vector<float> bias_;
  RoutingTotals totals_, last_step_;
};

/// Choices that an expert takes; see MoeOptions::capacity_factor. -1: all.
std::int64_t expert_capacity(const MoeOptions& options, std::int64_t tokens);

/// The layers of experts of a model and below, by path.
std::vector<std::pair<std::string, Moe*>> layers_of_experts(nn::Module& model);

}  // namespace sherd::parallel

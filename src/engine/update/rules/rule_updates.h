#pragma once

#include <memory>

#include "engine/update/rule_update.h"
#include "engine/update/rules/parameter_norms.h"
#include "engine/update/rules/whole_matrices.h"

// This folder holds what some rules do beside one pass over elements. Adam does nothing of it.
//
//   rule_updates.h       TrustUpdate and the others, each a RuleUpdate, of which make_rule_update() chooses
//   parameter_norms.h    norms of published tensors over all ranks, and trust ratios (LAMB, LARS)
//   whole_matrices.h     who orthogonalises which matrix, and its way there and back (Muon)
//   momentum_exchange.h  momentum that replicas exchange in place of gradients (1-bit Adam, 1-bit LAMB)
//   packed_tensors.h     the tensors that a stored parameter packs, and its padding

namespace sherd::engine {

/// Rules that multiply the step of each tensor by a trust ratio (LAMB, NVLAMB, LARS): a pass before the last
/// one measures norms, which all ranks then add up (ParameterNorms::share()).
class TrustUpdate : public RuleUpdate {
 public:
  TrustUpdate(const optim::Description& rule, UpdateContext& context, std::shared_ptr<ParameterNorms> norms)
      : RuleUpdate(rule, context), norms_(std::move(norms)) {}

  void begin_step() override { norms_->begin(); }
  bool pass(optim::Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) override;

 protected:
  /// As SpanVisit, with the tensor that the span is of.
  using TensorVisit = std::function<void(const MeasuredTensor&, const optim::Hyper&, const optim::SpanUpdate&,
                                         std::int64_t begin)>;
  ParameterNorms& norms() const { return *norms_; }
  /// Spans of one published tensor each, with its trust ratio. They begin where blocks of norms do
  /// (tensor/exact_sum.h), or end with such a block, so that sums do not depend on how a segment is cut.
  void for_each_tensor_span(const UpdateView& view, double factor, const TensorVisit& visit) const;
  void for_each_span(const UpdateView& view, double factor, const SpanVisit& visit) const override;
  double factor_of(const sharding::Segment& segment, const optim::Hyper& hyper, double factor) const override;

 private:
  bool measure(const UpdateView& view, double factor, tensor::Kernels& kernels);

  std::shared_ptr<ParameterNorms> norms_;
};

/// Rules of whole matrices (Muon): a pass over momenta makes directions, ranks exchange and orthogonalise
/// these (WholeMatrices), and the last pass moves the weights by what came of them.
std::unique_ptr<RuleUpdate> make_matrix_update(const optim::Description& rule, UpdateContext& context,
                                               std::shared_ptr<WholeMatrices> matrices);

/// 1-bit Adam: behind its freeze_step a pass packs momentum, replicas exchange it in place of gradients
/// (MomentumExchange), and the last pass moves the weights by what they agreed on. Before that, and where
/// there is one replica, it is Adam.
std::unique_ptr<RuleUpdate> make_one_bit_update(const optim::Description& rule, UpdateContext& context);

/// 1-bit LAMB: behind its freeze_step replicas exchange momentum as 1-bit Adam's do, where there are several;
/// then a pass takes it, refreshes the variance, and measures what trust ratios are made of, and the last
/// pass moves the weights. Before that it is LAMB.
std::unique_ptr<RuleUpdate> make_one_bit_lamb_update(const optim::Description& rule, UpdateContext& context,
                                                     std::shared_ptr<ParameterNorms> norms);

}  // namespace sherd::engine

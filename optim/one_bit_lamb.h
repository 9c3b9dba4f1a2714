#pragma once

#include "optim/one_bit.h"
#include "optim/parameter_norms.h"

// 1-bit LAMB behind its freeze_step (Li et al., "1-bit LAMB: communication efficient large-scale large-batch
// training with LAMB's convergence speed", 2022, algorithm 1): trust ratios that replicas cannot know without
// their gradients are made from those of before and from how much variances have changed since.

namespace sherd::optim {

/// A logical parameter's trust ratios, as kept from step to step.
struct TrustMemory {
  double mean = 0;         ///< mean of its trust ratios up to freeze_step; 0: there was none but 1
  double factor = 1;       ///< the step before's factor on that
  bool refreshed = false;  ///< there is a fresh variance, of the step before
  bool operator==(const TrustMemory&) const = default;
};

/// Up to freeze_step: takes a step's trust ratio into the mean, coeff_beta of which stays. A ratio of 1,
/// which stands for norms of 0, teaches nothing. The factor and fresh variance of a run that was frozen
/// already are dropped: the variance moves on without them.
void remember(const Hyper& hyper, double trust, TrustMemory& memory);

/// Behind freeze_step: mean·f, the trust ratio of this step. From the norms of m/(√v + eps) and of that +
/// wd·p, ρ = min(1, their quotient), and the largest (√v + eps)/(√w + eps), w the fresh variance, f = ratio·ρ
/// + 1 − ρ, within [factor_min, factor_max] and factor_threshold of the one before. The trust ratio is 1
/// where there is no mean, as all before were 1.
double frozen_trust(const Hyper& hyper, double direction, double update, double ratio, TrustMemory& memory);

/// The pass that takes the momentum of the step, in place, refreshes the variance, and adds to `sums` what
/// frozen_trust() needs: squares of directions as those of weights, of updates as measured, and the largest
/// ratio. The momentum is what replicas `agreed` on, or comes from the span's gradient where that is null.
/// `fresh`: as many elements as the span; `first`, where memory is not `refreshed`: it begins as the
/// variance.
void refresh_variance(const SpanUpdate& span, const AgreedMomentum* agreed, float* fresh, bool first,
                      const Hyper& hyper, Arena& arena, NormSums& sums, CpuIsa isa = cpu_isa());
/// The same where the memory is; a GPU is waited for.
void refresh_variance(const SpanUpdate& span, const AgreedMomentum* agreed, float* fresh, bool first,
                      const Hyper& hyper, tensor::Kernels& kernels, NormSums& sums);

/// Takes the memory that this does on a GPU for a span of `elements`, and gives it back: for a device that
/// only tracks it.
void charge_refresh(device::Device& device, std::int64_t elements);

}  // namespace sherd::optim

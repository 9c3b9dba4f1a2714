#pragma once

#include "device/cuda/target.h"
#include "optim/cuda/dispatch.h"

namespace sherd::optim::SHERD_CUDA {

using device::SHERD_CUDA::Target;

/// refresh_variance() of optim/one_bit_lamb.h by gradients, on memory of the device; queued. The processor's
/// bits.
void refresh_variance(const Target& target, const FrozenLamb& rule, const SpanUpdate& span,
                      const float* weights, float* fresh, bool first, const RefreshResults& results);

}  // namespace sherd::optim::SHERD_CUDA

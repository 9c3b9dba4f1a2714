#pragma once

#include "device/cuda/target.h"
#include "optim/isa/update_plan.h"

namespace sherd::optim::SHERD_CUDA {

using device::SHERD_CUDA::Target;

/// Queues the update of a span whose moments are codes (optim/quantized.h); see update() in
/// optim/cuda/update.h.
void update_codes(const Target& target, const PlannedSpan& planned, unsigned* not_finite);

}  // namespace sherd::optim::SHERD_CUDA

#pragma once

#include "device/cuda/target.h"
#include "optim/cuda/dispatch.h"

namespace sherd::optim::SHERD_CUDA {

using device::SHERD_CUDA::Target;

// optim/one_bit.h and optim/one_bit_lamb.h on memory of the device, as optim/cuda/dispatch.h has them;
// queued. The processor's bits.

void compress_momentum(const Target& target, const MomentumSpan& span);
void average_momentum(const Target& target, const SentMomentum& sent, float* error, std::uint64_t* result,
                      std::int64_t n);
void settle_error(const Target& target, float* error, float scale, std::int64_t n);
void take_momentum(const Target& target, const AgreedMomentum& agreed, const float* variance, float* momentum,
                   std::int64_t n);
void refresh_variance(const Target& target, const FrozenLamb& rule, const SpanUpdate& span,
                      const AgreedMomentum* agreed, const float* weights, float* fresh, bool first,
                      const RefreshResults& results);

}  // namespace sherd::optim::SHERD_CUDA

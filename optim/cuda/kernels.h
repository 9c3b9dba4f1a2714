#pragma once

#include <span>

#include "device/cuda/target.h"
#include "optim/cuda/dispatch.h"

namespace sherd::optim::SHERD_CUDA {

using device::SHERD_CUDA::Target;

/// Queues updates of one step by one Hyper, as few kernels as can be: up to 32 consecutive spans share one
/// where they differ in nothing but memory, decay and noise. All memory is the device's. The CPU's bits. A
/// kernel that writes something not finite sets *not_finite, memory that the device can reach, to 1.
void update(const Target& target, std::span<const PlannedSpan> spans, unsigned* not_finite);

/// optim/split_master.h on memory of the device; queued.
void split_master(const Target& target, const float* master, void* high, std::uint16_t* low, std::int64_t n);
void join_master(const Target& target, const void* high, const std::uint16_t* low, float* master,
                 std::int64_t n);
void round_masters(const Target& target, const float* master, void* to, DType dtype, std::int64_t n);

/// Queues the update of a span whose moments are codes (optim/quantized.h); as update().
void update_codes(const Target& target, const PlannedSpan& planned, unsigned* not_finite);

/// optim/pruned.h on memory of the device; queued.
void mark_pruned(const Target& target, const PrunedSpan& span);
void restore_pruned(const Target& target, const PrunedSpan& span);

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

#pragma once

#include <span>

#include "optim/isa/span_plan.h"
#include "optim/one_bit.h"
#include "optim/pruned.h"

// The kernels of optim/cuda/kernels.h by device; optim/cuda/stub stands in where a build has none.

namespace sherd::device {
class Device;
}

namespace sherd::optim {

/// Whether this is memory of `device`, a GPU that runs kernels. False for every other device, also for a
/// pretended GPU (tests/support/gpu/lazy_cuda.h), which has no multiprocessors and whose memory the processor
/// reads.
bool on_gpu(device::Device& device, const void* memory);

void update_on_gpu(device::Device& device, std::span<const PlannedSpan> spans, unsigned* not_finite);
void split_on_gpu(device::Device& device, const float* master, void* high, std::uint16_t* low,
                  std::int64_t n);
void join_on_gpu(device::Device& device, const void* high, const std::uint16_t* low, float* master,
                 std::int64_t n);
/// The memory that refresh_variance() writes its measurements to: one for each element, and the largest
/// ratio, which must begin as 0.
struct RefreshResults {
  float *directions, *updates, *ratio;
};
/// `agreed`: null where the momentum comes from the span's gradient.
void refresh_on_gpu(device::Device& device, const FrozenLamb& rule, const SpanUpdate& span,
                    const AgreedMomentum* agreed, const float* weights, float* fresh, bool first,
                    const RefreshResults& results);

// As in optim/one_bit.h, without the sums of squares.
void compress_on_gpu(device::Device& device, const MomentumSpan& span);
void average_on_gpu(device::Device& device, const SentMomentum& sent, float* error, std::uint64_t* result,
                    std::int64_t n);
void settle_on_gpu(device::Device& device, float* error, float scale, std::int64_t n);
/// ±scale in place of the momentum, 0 where the variance is; the error settles, and is 0 likewise.
void take_on_gpu(device::Device& device, const AgreedMomentum& agreed, const float* variance, float* momentum,
                 std::int64_t n);
/// As in optim/pruned.h.
void mark_pruned_on_gpu(device::Device& device, const PrunedSpan& span);
void restore_pruned_on_gpu(device::Device& device, const PrunedSpan& span);
void round_on_gpu(device::Device& device, const float* master, void* to, DType dtype, std::int64_t n);

}  // namespace sherd::optim

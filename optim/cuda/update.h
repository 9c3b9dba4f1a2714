#pragma once

#include <span>

#include "device/cuda/target.h"
#include "optim/isa/update_plan.h"

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

}  // namespace sherd::optim::SHERD_CUDA

#pragma once

#include "device/cuda/target.h"
#include "optim/update_plan.h"

namespace sherd::optim::SHERD_CUDA {

using device::SHERD_CUDA::Target;

/// Queues the update that `plan` was made from `span` for; all of the span's memory is the device's. The
/// CPU's bits. A kernel that writes something not finite sets *not_finite, memory that the device can reach,
/// to 1.
void update(const Target& target, const UpdatePlan& plan, const SpanUpdate& span, unsigned* not_finite);

/// optim/split_master.h on memory of the device; queued.
void split_master(const Target& target, const float* master, void* high, std::uint16_t* low, std::int64_t n);
void join_master(const Target& target, const void* high, const std::uint16_t* low, float* master,
                 std::int64_t n);
void round_masters(const Target& target, const float* master, void* to, DType dtype, std::int64_t n);

/// False for memory of the host, page-locked or not.
bool is_device_memory(const void* memory);

}  // namespace sherd::optim::SHERD_CUDA

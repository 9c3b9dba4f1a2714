#pragma once

#include <cstdint>
#include <span>

#include "comm/exchange/worker.h"
#include "device/accelerator.h"
#include "device/cuda/target.h"

namespace sherd::comm {

namespace SHERD_CUDA {

/// Queues Worker::reduce() on the target's stream, to the CPU's bits (fp32 sums on GPUs and processors alike
/// flush subnormal numbers). The memory must be reachable by the GPU.
void reduce(const device::SHERD_CUDA::Target& target, const ReduceSpec& how,
            std::span<const std::byte* const> sources, std::span<std::byte* const> outs, std::int64_t count);

}  // namespace SHERD_CUDA

/// The same on a stream of `gpu`. Throws Error{config} where this build has no CUDA, Error{usage} for memory
/// that the GPU does not reach.
void reduce_on_gpu(device::Accelerator& gpu, device::Stream& stream, const ReduceSpec& how,
                   std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                   std::int64_t count);

}  // namespace sherd::comm

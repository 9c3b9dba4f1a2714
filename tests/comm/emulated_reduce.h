#pragma once

#include <span>

#include "comm/exchange/worker.h"
#include "device/device.h"

namespace sherd::comm {

/// comm/cuda/reduce.h by the emulated kernels, on memory of the processor.
void emulated_reduce(device::Device& device, const ReduceSpec& how, std::span<const std::byte* const> sources,
                     std::span<std::byte* const> outs, std::int64_t count);

}  // namespace sherd::comm

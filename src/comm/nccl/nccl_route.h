#pragma once

#include <cstdint>
#include <memory>

#include "comm/exchange/gpu/gpu_route.h"

namespace sherd::comm {

/// Tells GPUs apart over all machines; 0 where NCCL is not built, or CUDA does not know this GPU.
std::uint64_t nccl_card(device::Accelerator& gpu);

/// Collective: a group's communicator of NCCL, whose unique id travels by `host`. Throws Error{comm}.
std::unique_ptr<GpuRoute> make_nccl_route(Backend& host, const std::shared_ptr<device::Accelerator>& gpu);

}  // namespace sherd::comm

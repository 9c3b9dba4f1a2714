#pragma once

#include <memory>
#include <string>

#include "comm/exchange/gpu_route.h"

namespace sherd::comm {

struct NcclStatus {
  bool built = false;
  std::string version;  ///< of the library at hand, "2.28.9"; empty without
};
/// Never throws.
NcclStatus nccl_status();

/// Tells GPUs apart over all machines; 0 where NCCL is not built, or CUDA does not know this GPU.
std::uint64_t nccl_card(device::CudaDevice& gpu);

/// Collective: a group's communicator of NCCL, whose unique id travels by `host`. Throws Error{comm}.
std::unique_ptr<GpuRoute> make_nccl_route(Backend& host, const std::shared_ptr<device::CudaDevice>& gpu);

}  // namespace sherd::comm

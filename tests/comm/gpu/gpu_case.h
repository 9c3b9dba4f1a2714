#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>

#include "device/cuda.h"
#include "tests/comm/conformance.h"

namespace sherd::comm::conformance::gpu {

/// A rank's GPU: its own where there are enough for the world, else shared.
inline std::shared_ptr<device::Device> gpu_of(int world_rank) {
  const auto gpus = device::cuda_status().gpus;
  require(!gpus.empty(), "no GPU: ", device::cuda_status().why_not);
  return device::make_cuda_device(
      {.ordinal = gpus[static_cast<std::size_t>(world_rank) % gpus.size()].ordinal, .timeout_seconds = 60});
}

/// Empty where there are `wanted` GPUs.
inline std::string lacking(std::size_t wanted) {
  const device::CudaStatus status = device::cuda_status();
  if (!status.usable()) return cat("no GPU: ", status.why_not);
  if (status.gpus.size() >= wanted) return "";
  return cat("needs ", wanted, " GPUs, of which this machine shows ", status.gpus.size());
}

/// The ranks of a case take GPUs.
inline void use_gpus(Case& out, std::size_t wanted = 1) {
  out.device = [](Communicator& comm) { return gpu_of(comm.rank()); };
  out.unavailable = [wanted] { return lacking(wanted); };
}

}  // namespace sherd::comm::conformance::gpu

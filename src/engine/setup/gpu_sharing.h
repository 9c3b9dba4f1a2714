#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "device/cuda.h"
#include "engine/distributed.h"

namespace sherd::engine {

/// Where one rank computes.
struct GpuSeat {
  std::array<std::uint8_t, 16> gpu{};  ///< which of all GPUs of the world; all zero: none
  std::uint64_t memory = 0;            ///< of it, bytes
  double peak = 0;  ///< `device.peak_tflops` or its data sheet's (device/cuda.h), in FLOP/s; 0: unknown
  bool on_gpu() const { return gpu != std::array<std::uint8_t, 16>{}; }
};

/// How ranks share GPUs, as one of them sees it.
struct GpuSharing {
  int gpus = 0;              ///< in use by all ranks, each counted once
  int ranks_here = 0;        ///< on this rank's GPU, itself among them; 0: it has none
  std::uint64_t memory = 0;  ///< of this rank's GPU, bytes
  double peak = 0;           ///< of all GPUs in use together, in FLOP/s; 0: that of one is unknown
};

/// The seat of the rank that is `local_rank`-th on a machine whose driver shows it `gpus`, which may be one
/// of its own (CUDA_VISIBLE_DEVICES), or none. A GPU whose driver does not identify it is told by `machine`
/// and its number.
GpuSeat gpu_seat(const config::Config& config, const std::vector<device::CudaGpu>& gpus, int local_rank,
                 std::string_view machine);

/// The share of `rank`, by the seats of all ranks in rank order.
GpuSharing share_gpus(std::span<const GpuSeat> seats, int rank);

/// The share of one of `ranks` ranks inside this process.
GpuSharing share_gpus_locally(const config::Config& config, int ranks);
/// The share of one of the ranks of `dist`, which tell each other: what one driver shows says nothing of the
/// others' GPUs. Collective, before the world is bound to a device.
GpuSharing share_gpus_of_world(const config::Config& config, const Distributed& dist);

}  // namespace sherd::engine

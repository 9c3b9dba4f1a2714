#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "device/cuda.h"
#include "device/device.h"
#include "engine/distributed.h"
#include "tensor/kernels.h"

namespace sherd::engine {

/// Compute threads of one of `local_ranks` ranks on this machine: what `device.threads_per_rank` says, or its
/// share of the cores.
int compute_threads(const config::Config& config, int local_ranks);

/// Whether a run of this configuration is meant for GPUs: `device.type` "cuda", be there one here or not, or
/// "auto" where there is one. For those who plan.
bool meant_for_gpus(const config::Config& config);

/// Whether a run of this configuration takes GPUs here: `device.type` "cuda", or "auto" where there is one.
/// Throws Error{io} with the reason when "cuda" is asked for and cannot be had.
bool takes_gpus(const config::Config& config);

/// Why `device.type` "auto" takes no GPU on a machine that has an NVIDIA driver; else empty: without a driver
/// nobody expects a GPU.
std::string unexpected_lack(const device::CudaStatus& status);

/// This rank's device: a GPU, chosen by the rank's place on its machine and shared where there are fewer GPUs
/// than ranks, or its share of the cores. Ledger limits are the caller's to set. Throws Error{config}, and
/// Error{io} without such a GPU.
std::shared_ptr<device::Device> make_device(const config::Config& config, const Distributed& dist);

/// The kernels of `device` with what the section `device` chooses for GPUs. The device must outlive them.
std::unique_ptr<tensor::Kernels> make_kernels(const config::Config& config, device::Device& device);

/// Where one rank computes.
struct GpuSeat {
  std::array<std::uint8_t, 16> gpu{};  ///< which of all GPUs of the world; all zero: none
  std::uint64_t memory = 0;            ///< its bytes
  double peak = 0;  ///< `device.peak_tflops` or its data sheet's (device/cuda.h), in FLOP/s; 0: unknown
  bool on_gpu() const { return gpu != std::array<std::uint8_t, 16>{}; }
};

/// How ranks share GPUs, as one of them sees it.
struct GpuSharing {
  int gpus = 0;              ///< in use by all ranks, each counted once
  int ranks_here = 0;        ///< on this rank's GPU, itself among them; 0: it has none
  std::uint64_t memory = 0;  ///< bytes of this rank's GPU
  double peak = 0;           ///< sum over all GPUs in use, in FLOP/s; 0: that of one is unknown
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

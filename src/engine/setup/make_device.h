#pragma once

#include <memory>
#include <string>
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
/// Throws Error{config} with the reason when "cuda" is asked for and cannot be had.
bool takes_gpus(const config::Config& config);

/// Why `device.type` "auto" takes no GPU on a machine that has an NVIDIA driver; else empty: without a driver
/// nobody expects a GPU.
std::string unexpected_lack(const device::CudaStatus& status);

/// This rank's device: a GPU, chosen by the rank's place on its machine and shared where there are fewer GPUs
/// than ranks, or its share of the cores. Ledger limits are the caller's to set. Throws Error{config}.
std::shared_ptr<device::Device> make_device(const config::Config& config, const Distributed& dist);

/// The kernels of `device` with what the section `device` chooses for GPUs. The device must outlive them.
std::unique_ptr<tensor::Kernels> make_kernels(const config::Config& config, device::Device& device);

}  // namespace sherd::engine

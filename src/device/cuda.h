#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "device/accelerator.h"

namespace sherd::device {

/// One GPU that the driver shows to this process (CUDA_VISIBLE_DEVICES applies).
struct CudaGpu {
  int ordinal = 0;
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  std::uint64_t memory = 0;  ///< bytes
  int processors = 0;        ///< streaming multiprocessors
  double clock_hz = 0;       ///< the highest that its multiprocessors run at; 0: the driver does not say
  std::size_t shared_per_block = 0;  ///< bytes of shared memory that a block may ask for
  /// The same in every process of the machine, of no other GPU; all zero: not known.
  std::array<std::uint8_t, 16> uuid{};
};

/// CUDA as this build and this machine have it.
struct CudaStatus {
  bool built = false;          ///< this build has CUDA
  std::string version;         ///< the runtime that it was built with, "13.0"; empty without
  std::string driver_version;  ///< the newest that the installed driver serves; empty without a driver
  std::vector<CudaGpu> gpus;   ///< GPUs that this build has kernels for
  /// Why there is none, and what to do about it; empty where there are GPUs.
  std::string why_not;
  bool usable() const { return !gpus.empty(); }
};

/// Asks the driver. Never throws.
CudaStatus cuda_status();

/// The GPU, counted among `gpus`, of the rank that is `local_rank`-th of those on its machine: its own where
/// there are enough, else shared by ranks that follow in turn.
int cuda_ordinal_for(int local_rank, int gpus);

/// How a CUDA device is made.
struct CudaDeviceOptions {
  int ordinal = 0;
  int threads = 1;  ///< compute threads of the processor, for what stays there (offloaded optimizers)
  std::vector<int> cores = {};    ///< as for make_cpu_device()
  double timeout_seconds = 1800;  ///< limit of every wait for the device
  bool graphs = false;  ///< run sequences of the compute stream's work that come again as CUDA graphs
};

/// Throws Error{io} with cuda_status().why_not where there is no such GPU, Error{memory} when it has no
/// room.
std::shared_ptr<Accelerator> make_cuda_device(const CudaDeviceOptions& options);

/// The FLOP/s that `gpu` reaches at most in dense products of `dtype` summed in fp32, as its data sheet says:
/// the denominator of MFU. bf16 and fp16 run on the tensor cores; fp32 does only with `tf32`. Of a part of a
/// card (MIG) its share of the multiprocessors. A card that is not known counts as multiprocessors × clock ×
/// what one does per cycle at its compute capability; 0 where that is not known either, and for other dtypes.
double peak_flops(const CudaGpu& gpu, DType dtype, bool tf32 = false);

}  // namespace sherd::device

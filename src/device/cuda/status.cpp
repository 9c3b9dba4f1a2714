#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "device/cuda.h"

namespace sherd::device {
namespace {

/// A stream that waits must not hold up another: a rank has more of them than the 8 hardware queues that the
/// driver gives unless it is told, once, before its first call; and the environment is set while there are no
/// threads. What the user says stays.
[[maybe_unused]] const int connections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);

std::string version_text(int version) {
  return cat(version / 1000, ".", version % 1000 / 10);
}

/// The oldest compute capability that this build has kernels for, times 10; 0 where the list does not say.
int oldest_architecture() {
  constexpr std::string_view list = SHERD_CUDA_ARCHITECTURES;
  int oldest = 0, number = 0;
  for (const char c : cat(list, ",")) {
    if (c >= '0' && c <= '9') {
      number = number * 10 + (c - '0');
    } else {
      if (number > 0) oldest = oldest == 0 ? number : std::min(oldest, number);
      number = 0;
    }
  }
  return oldest;
}

/// Why the driver counts no GPUs.
std::string no_gpu_text(cudaError_t error, const CudaStatus& status) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (status.driver_version.empty()) return "no NVIDIA driver is installed here";
  if (error == cudaErrorInsufficientDriver)
    return cat("the NVIDIA driver serves CUDA up to ", status.driver_version, " and this build needs ",
               status.version, ": update the driver");
  if (error == cudaErrorNoDevice || error == cudaSuccess)
    return visible ? cat("the driver shows no GPU, with CUDA_VISIBLE_DEVICES set to '", visible, "'")
                   : std::string("the driver shows no GPU (see nvidia-smi)");
  return cat("the driver cannot be used: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

CudaGpu gpu_of(int ordinal) {
  CudaGpu gpu;
  gpu.ordinal = ordinal;
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) return gpu;
  gpu.name = properties.name;
  gpu.major = properties.major;
  gpu.minor = properties.minor;
  gpu.memory = properties.totalGlobalMem;
  gpu.processors = properties.multiProcessorCount;
  gpu.shared_per_block = properties.sharedMemPerBlockOptin;
  static_assert(sizeof properties.uuid.bytes == sizeof gpu.uuid);
  std::memcpy(gpu.uuid.data(), properties.uuid.bytes, gpu.uuid.size());
  int kilohertz = 0;
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, ordinal) == cudaSuccess)
    gpu.clock_hz = 1e3 * kilohertz;
  else
    cudaGetLastError();
  return gpu;
}

}  // namespace

CudaStatus cuda_status() {
  CudaStatus status;
  status.built = true;
  int runtime = 0, driver = 0, count = 0;
  if (cudaRuntimeGetVersion(&runtime) == cudaSuccess) status.version = version_text(runtime);
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0)
    status.driver_version = version_text(driver);
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    status.why_not = no_gpu_text(error, status);
    return status;
  }
  const int oldest = oldest_architecture();
  std::string too_old;
  for (int i = 0; i < count; ++i) {
    CudaGpu gpu = gpu_of(i);
    if (gpu.major * 10 + gpu.minor >= oldest && gpu.major > 0)
      status.gpus.push_back(std::move(gpu));
    else
      too_old = cat("GPU ", i, " ('", gpu.name, "') has compute capability ", gpu.major, ".", gpu.minor,
                    " and this build has kernels from ", oldest / 10, ".", oldest % 10,
                    " on: configure it with -DCMAKE_CUDA_ARCHITECTURES=", gpu.major, gpu.minor);
  }
  if (status.gpus.empty()) status.why_not = too_old;
  return status;
}

}  // namespace sherd::device

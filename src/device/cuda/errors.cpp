#include <cuda_runtime_api.h>

#include "device/cuda/driver.h"

namespace sherd::device::cuda {
namespace {

struct Advice {
  ErrorKind kind;
  const char* next_step;
};

Advice advice_for(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return {ErrorKind::memory,
              "shard further, shrink the micro-batch, or end other programs on this GPU (nvidia-smi)"};
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
      return {ErrorKind::io, "update the NVIDIA driver, or set device.type to \"cpu\""};
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
      return {ErrorKind::io, "see nvidia-smi and CUDA_VISIBLE_DEVICES, or set device.type to \"cpu\""};
    case cudaErrorDevicesUnavailable:
      return {ErrorKind::io,
              "the GPU is used exclusively by another program (nvidia-smi); end it or take another GPU"};
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return {ErrorKind::io, "configure the build with -DCMAKE_CUDA_ARCHITECTURES for this GPU"};
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
      return {ErrorKind::io,
              "the GPU's hardware failed: take it out of service and resume from the last checkpoint"};
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
      return {
          ErrorKind::io,
          "work cannot be captured as a CUDA graph, or another thread waited for the whole GPU meanwhile: "
          "set device.cuda_graphs to false if a run ends by it"};
    default:
      return {ErrorKind::io,
              "what this process has on the GPU is lost: resume from the last checkpoint; "
              "CUDA_LAUNCH_BLOCKING=1 tells which "
              "call it was, for earlier work may be reported here"};
  }
}

/// Whether this process has a context on the GPU. Making a GPU current creates one, which takes half a
/// gigabyte of it: a thread that never chose a GPU stands on the first, which may be another rank's.
bool has_context(int ordinal) {
  using GetState = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
  static const GetState get_state = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, 12000,
                                                                cudaEnableDefault, &found);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &entry, cudaEnableDefault, &found);
#endif
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<GetState>(entry);
  }();
  unsigned flags = 0;
  int active = 0;
  return get_state && get_state(ordinal, &flags, &active) == 0 && active != 0;
}

}  // namespace

void fail_call(int status, const char* call) {
  const auto error = static_cast<cudaError_t>(status);
  cudaGetLastError();  // so that a later call does not report it again
  const Advice advice = advice_for(error);
  fail(advice.kind, call, " failed: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), "); ",
       advice.next_step);
}

OnGpu::OnGpu(int ordinal) {
  int current = 0;
  check_call(cudaGetDevice(&current), "cudaGetDevice");
  if (current == ordinal) return;
  check_call(cudaSetDevice(ordinal), "cudaSetDevice");
  before_ = current;
}

OnGpu::~OnGpu() {
  if (before_ >= 0 && has_context(before_)) cudaSetDevice(before_);
}

}  // namespace sherd::device::cuda

#include <cuda_runtime_api.h>

#include "comm/cuda/reduce.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/driver.h"

namespace sherd::comm {
namespace {

void require_reachable(const void* memory) {
  cudaPointerAttributes attributes{};
  device::cuda::check_call(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  require(
      attributes.type != cudaMemoryTypeUnregistered,
      "a collective on a GPU was given memory of the host that is not page-locked: allocate it in the host "
      "tier of the device");
}

}  // namespace

void reduce_on_gpu(device::Accelerator& gpu, device::Stream& stream, const ReduceSpec& how,
                   std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                   std::int64_t count) {
  for (const std::byte* source : sources) require_reachable(source);
  for (const std::byte* out : outs) require_reachable(out);
  if (how.onto) require_reachable(how.onto);
  SHERD_CUDA::reduce({gpu, &stream.queue(), device::as_cuda(gpu).gpu().processors}, how, sources, outs,
                     count);
}

}  // namespace sherd::comm

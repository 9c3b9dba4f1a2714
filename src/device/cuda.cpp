#include "device/cuda.h"

#include "base/error.h"

namespace sherd::device {

CudaDevice& as_cuda(Device& device) {
  require(device.kind() == Kind::cuda, "a CUDA device is needed here");
  return static_cast<CudaDevice&>(device);
}

int cuda_ordinal_for(int local_rank, int gpus) {
  require(local_rank >= 0 && gpus > 0, "no GPU can be chosen for local rank ", local_rank, " among ", gpus);
  return local_rank % gpus;
}

}  // namespace sherd::device

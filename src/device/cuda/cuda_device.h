#pragma once

#include "base/error.h"
#include "device/cuda.h"

namespace sherd::device {

/// A rank's GPU, as those see it who give it kernels of CUDA.
class CudaDevice : public Accelerator {
 public:
  Kind kind() const final { return Kind::cuda; }
  std::string name() const final { return gpu().name; }
  int ordinal() const final { return gpu().ordinal; }
  virtual const CudaGpu& gpu() const = 0;
};

/// `device` as what it is. Throws Error{usage} for a device of another kind.
inline CudaDevice& as_cuda(Device& device) {
  require(device.kind() == Kind::cuda, "a CUDA device is needed here");
  return static_cast<CudaDevice&>(device);
}

}  // namespace sherd::device

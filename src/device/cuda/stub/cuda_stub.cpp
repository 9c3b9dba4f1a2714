#include "base/error.h"
#include "device/cuda.h"
#include "device/trace_range.h"

namespace sherd::device {

CudaStatus cuda_status() {
  CudaStatus status;
  status.why_not =
      "this build has no CUDA (it was configured where no CUDA toolkit was found, or with "
      "SHERD_WITH_CUDA=OFF)";
  return status;
}

std::shared_ptr<Accelerator> make_cuda_device(const CudaDeviceOptions&) {
  fail(ErrorKind::io, "there is no CUDA device: ", cuda_status().why_not);
}

void push_profiler_range(std::string_view, std::string_view) {}
void pop_profiler_range() {}

}  // namespace sherd::device

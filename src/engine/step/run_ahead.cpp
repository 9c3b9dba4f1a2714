#include "engine/step/run_ahead.h"

#include "device/cuda.h"

namespace sherd::engine {

void RunAhead::begin(int chunks) {
  if (device_.kind() != device::Kind::cuda) return;
  for (; under_way_.size() >= 2 * most * static_cast<std::size_t>(chunks); under_way_.pop_front())
    under_way_.front().wait(device::as_cuda(device_).deadline(), "an earlier micro-batch");
}

void RunAhead::end() {
  if (device_.kind() == device::Kind::cuda)
    under_way_.push_back(device::as_cuda(device_).compute_stream().record());
}

}  // namespace sherd::engine

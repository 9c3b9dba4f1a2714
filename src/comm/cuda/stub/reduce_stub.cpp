#include "comm/cuda/reduce.h"

namespace sherd::comm {

void reduce_on_gpu(device::Accelerator&, device::Stream&, const ReduceSpec&,
                   std::span<const std::byte* const>, std::span<std::byte* const>, std::int64_t) {
  fail(ErrorKind::config, "this build has no CUDA: its ranks cannot reduce tensors of a GPU");
}

}  // namespace sherd::comm

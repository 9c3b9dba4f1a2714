#include "tests/comm/emulated_reduce.h"

#include "comm/cuda/reduce.h"

namespace sherd::comm {

void emulated_reduce(device::Device& device, const ReduceSpec& how, std::span<const std::byte* const> sources,
                     std::span<std::byte* const> outs, std::int64_t count) {
  SHERD_CUDA::reduce({device, nullptr, 1}, how, sources, outs,
                     count);  // one processor: loops go round the grid
}

}  // namespace sherd::comm

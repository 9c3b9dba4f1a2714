#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/exchange/worker.h"
#include "support/gpu/lazy_cuda.h"

namespace sherd::comm {

/// For lazy GPUs: what a kernel of comm/cuda/reduce.h would do, in the order of the stream, by the processor.
inline void reduce_by_processor(device::Accelerator& gpu, device::Stream& stream, const ReduceSpec& how,
                                std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                                std::int64_t count) {
  const std::vector<const std::byte*> from(sources.begin(), sources.end());
  const std::vector<std::byte*> to(outs.begin(), outs.end());
  dynamic_cast<sherd::testing::LazyCudaDevice&>(gpu).submit(stream, [=] {
    const std::unique_ptr<Worker> worker = make_cpu_worker(1);
    worker->begin({}, 0);
    worker->reduce(how, from, to, count);
  });
}

}  // namespace sherd::comm

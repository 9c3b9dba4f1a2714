#pragma once

#include <functional>

#include "comm/communicator.h"
#include "comm/cuda/reduce.h"
#include "comm/exchange/gpu/gpu_worker.h"

namespace sherd::comm {

/// The options of local groups: for tests, whose GPUs run no kernels.
struct LocalOptions {
  CommOptions comm;
  GpuReduce gpu_reduce = reduce_on_gpu;
};

void run_local(int ranks, const LocalOptions& options, const std::function<void(Communicator&)>& body);

}  // namespace sherd::comm

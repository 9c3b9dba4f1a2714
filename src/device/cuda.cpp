#include "device/cuda.h"

#include "base/error.h"

namespace sherd::device {

int cuda_ordinal_for(int local_rank, int gpus) {
  require(local_rank >= 0 && gpus > 0, "no GPU can be chosen for local rank ", local_rank, " among ", gpus);
  return local_rank % gpus;
}

}  // namespace sherd::device

#pragma once

#include <memory>

#include "autograd/tape.h"
#include "offload/store.h"

namespace sherd::engine {

/// What full recompute keeps of the forward pass, on NVMe (activation_checkpointing.nvme_checkpointing):
/// written behind forward, and read ahead of backward in the order in which the last forward and backward
/// wanted it back. A fixed number of host buffers lies between. Used from the rank's thread.
class NvmeCheckpoints final : public autograd::CheckpointKeeper {
 public:
  /// All must outlive it and the tapes that use it. `buffers`: how many values are in memory at most on their
  /// way.
  NvmeCheckpoints(tensor::Kernels& kernels, offload::Store& store, int buffers = 8);
  ~NvmeCheckpoints() override;

  /// Begins to write a copy of the value. Waits for a buffer, at most the store's deadline. Throws Error{io}
  /// as the store does, there and where the value is brought back.
  Restore keep(const tensor::Tensor& value) override;

 private:
  struct Kept;
  class Pool;
  std::shared_ptr<Pool> pool_;
};

}  // namespace sherd::engine

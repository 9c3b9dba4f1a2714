#pragma once

#include <memory>

#include "autograd/tape.h"
#include "offload/store.h"

namespace sherd::engine {

/// Inputs that full recompute saves in the forward pass, on NVMe
/// (activation_checkpointing.nvme_checkpointing): written behind forward, and read ahead of backward in the
/// order in which the last forward and backward wanted it back. A fixed number of host buffers lies between.
/// Used from the rank's thread.
class SavedInputsOnNvme final : public autograd::SavedInputs {
 public:
  /// All must outlive it and the tapes that use it. `buffers`: how many values are in memory at most on their
  /// way.
  SavedInputsOnNvme(tensor::Kernels& kernels, offload::Store& store, int buffers = 8);
  ~SavedInputsOnNvme() override;

  /// Begins to write a copy of the value. Waits for a buffer, at most the store's deadline. Throws Error{io}
  /// as the store does, there and where the value is brought back.
  Restore save(const tensor::Tensor& value) override;

 private:
  struct Input;
  class Pool;
  std::shared_ptr<Pool> pool_;
};

}  // namespace sherd::engine

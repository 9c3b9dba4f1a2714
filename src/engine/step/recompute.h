#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "autograd/tape.h"
#include "engine/pipeline/train_schedule.h"
#include "offload/store.h"

namespace sherd::engine {

/// Has the first `training.recompute_blocks` blocks of this rank recompute, in the order of the model's parts
/// (of another model: of its declarations); the others keep all that they make. Blocks within a block go with
/// it. Returns how many blocks there are.
std::int64_t choose_blocks(nn::Model& model, const config::Training& training, const StageLayout& layout);

/// A line for the log on what recomputes; empty where nothing does, or all. `blocks`: of this rank.
std::string describe_partial_recompute(const config::Config& config, std::int64_t blocks,
                                       const TrainSchedule& schedule);

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
  struct HostBuffer;
  struct Input;
  class Pool;
  std::shared_ptr<Pool> pool_;
};

}  // namespace sherd::engine

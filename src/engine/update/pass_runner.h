#pragma once

#include <functional>
#include <memory>

#include "device/stream.h"
#include "engine/update/update_chunk.h"
#include "optim/device_update.h"

namespace sherd::engine {

/// Makes the passes of updates where the memory is: on the processor; on a GPU, whose work is only queued; or
/// on the processor beside a GPU, to which the elements come in parts (UpdateStaging). On a device that only
/// tracks memory it takes what the pass would take, and gives it back. Used from the rank's thread.
class PassRunner {
 public:
  /// Makes a pass over a view, or over a part of one, where its memory is, and tells `check` whether anything
  /// became NaN or infinite.
  using Work = std::function<void(const UpdateView& part, optim::FiniteCheck& check)>;
  struct UpdatePass {
    Work work;
    bool moves_weights = false;
    /// Takes the memory that it does on a GPU, and gives it back. Null: none.
    std::function<void()> charge_on_gpu = nullptr;
  };

  /// Whether the processor updates what a GPU computes with.
  static bool beside_gpu(device::Device& device, const sharding::Segment& segment);

  /// False when what was written is NaN or infinite, as far as that is known at once.
  bool run(const UpdateView& view, device::Device& device, const UpdatePass& pass);
  /// Says that a pass over `view` follows those announced before it, with gradients that are complete, and
  /// parameters that work no longer reads, from `ready` on: beside a GPU its states begin to come to the
  /// processor. Its tensors last until end_series().
  void announce(const UpdateView& view, const device::Event& ready, device::Device& device);
  /// Work that the device is given from now on sees what was updated so far.
  void join();
  /// join(), and forgets what was announced and not updated.
  void end_series() noexcept;
  /// Waits for what a GPU was given since the last call, not for later work; false when any of it became NaN
  /// or infinite.
  bool finite();

 private:
  struct OnGpu;
  OnGpu& on_gpu(device::Device& device);

  std::shared_ptr<OnGpu> gpu_;  ///< staging and check for updates on or beside a GPU; null on CPUs
};

}  // namespace sherd::engine

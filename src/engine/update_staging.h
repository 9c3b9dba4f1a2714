#pragma once

#include <array>
#include <functional>

#include "device/cuda.h"
#include "engine/optimizer.h"

namespace sherd::engine {

/// Lets the processor update what an accelerator computes with (Ren et al. 2021, ZeRO-Offload): gradients,
/// and where the rule reads them parameters, come to page-locked memory in chunks, and updated parameters go
/// back, while the processor updates the chunk between. So both directions of the link and the processor work
/// at once. One per rank, used from its thread.
class UpdateStaging {
 public:
  explicit UpdateStaging(device::CudaDevice& device);

  /// Whether some states of `segment` lie with the GPU and others where the processor updates them.
  static bool needed_for(const sharding::Segment& segment);

  /// Calls `update` for consecutive parts of `view`, all of whose tensors the processor can then read and
  /// write, until it has seen everything; new parameters are in their place when the compute stream reaches
  /// the work that it is given after this. False when a call returned false. `part_elements`: of a part at
  /// most.
  bool run(const UpdateView& view, const std::function<bool(const UpdateView&)>& update,
           std::int64_t part_elements = usual_part);

  /// Takes the memory that run() would, and gives it back: for a device that only keeps books.
  static void book(device::Device& device, const UpdateView& view, std::int64_t part_elements = usual_part);

 private:
  static constexpr std::int64_t usual_part = std::int64_t{1} << 21;
  struct Slot;
  using Slots = std::array<Slot, 3>;
  static Slots make_slots(device::Device& device, const UpdateView& view, std::int64_t part_elements);
  class Joined;

  device::CudaDevice& device_;
  device::Stream fetching_, sending_;
};

}  // namespace sherd::engine

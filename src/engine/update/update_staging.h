#pragma once

#include <array>
#include <deque>
#include <functional>

#include "device/cuda.h"
#include "engine/update/update_chunk.h"

namespace sherd::engine {

/// Lets the processor update what an accelerator computes with (Ren et al. 2021, ZeRO-Offload): gradients,
/// and where the rule reads them parameters, come to page-locked memory in parts, and updated parameters go
/// back, while the processor updates the part between. So both directions of the link and the processor work
/// at once, from the first part of a series of updates to the last. One per rank, used from its thread.
class UpdateStaging {
 public:
  /// `part_elements`: of a part at most.
  explicit UpdateStaging(device::Accelerator& device, std::int64_t part_elements = usual_part);
  ~UpdateStaging() { end_series(); }
  UpdateStaging(const UpdateStaging&) = delete;
  UpdateStaging& operator=(const UpdateStaging&) = delete;

  /// Whether the processor updates `segment`: where the states that only the optimizer reads are.
  static bool by_processor(const sharding::Segment& segment);

  /// Says that `view` comes after those announced before; its first parts travel as soon as there is room for
  /// them. `ready`: when its gradients are complete and work no longer reads its parameters. Its tensors last
  /// until the end of the series.
  void announce(const UpdateView& view, const device::Event& ready);
  /// Calls `update` for consecutive parts of the earliest announced view that was not updated, all of whose
  /// tensors the processor can then read and write; returns with new parameters on their way. False when a
  /// call returned false. `changes` false: the calls only read, and nothing goes back.
  bool run(const std::function<bool(const UpdateView&)>& update, bool changes = true);
  /// Work that the compute stream is given from now on sees the parameters updated so far.
  void join();
  /// join(), and forgets what was announced and not updated; its memory goes back.
  void end_series() noexcept;

  /// Takes the memory that a series of views like this one does, and gives it back: for a device that only
  /// tracks it.
  static void charge(device::Device& device, const UpdateView& view, std::int64_t part_elements = usual_part);

 private:
  static constexpr std::int64_t usual_part = std::int64_t{1} << 21;
  static constexpr int slot_count = 3;
  /// Page-locked memory of one part under way. Three: one comes, one is updated, one goes.
  struct StagingSlot {
    device::Storage gradients, parameters;
    device::Event fetched, sent;
  };
  /// A stretch of an announced view. `staged`: as the processor updates it.
  struct StagedPart {
    UpdateView there, staged;
    device::Event ready;
    StagingSlot* slot;
    bool last;  ///< ends its view
  };
  void fetch_ahead();
  void fetch(StagedPart& part);
  void send(const StagedPart& part);
  tensor::Tensor room(device::Storage& storage, const tensor::Tensor& like);

  device::Accelerator& device_;
  const std::int64_t part_elements_;
  device::Stream fetching_, sending_;
  std::array<StagingSlot, slot_count> slots_;
  std::size_t next_slot_ = 0;
  std::deque<StagedPart> parts_;  ///< announced, not updated yet
  std::size_t fetched_ = 0;       ///< how many of parts_ are under way or here
};

}  // namespace sherd::engine

#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "device/stream.h"
#include "tensor/tensor.h"

// How the rank's thread runs ahead of an accelerator: it queues micro-batch after micro-batch and looks at
// results once per step. On CPUs everything has happened when a call returns.

namespace sherd::engine {

/// Holds the rank's thread back where it is so far ahead of an accelerator that more would gain nothing: what
/// is queued keeps page-locked memory (inputs, losses) until the device has passed. Counts what a micro-batch
/// does on a chunk of the model, forward and backward apart, in whatever order a schedule has them.
class RunAhead {
 public:
  static constexpr std::size_t most = 4;  ///< micro-batches under way, or as much of others

  explicit RunAhead(device::Device& device) : device_(device) {}
  /// Before forward or backward of a chunk is queued, of which the rank has `chunks`: waits until less than
  /// `most` micro-batches' are under way.
  void begin(int chunks);
  /// All of it has been queued.
  void end();

 private:
  device::Device& device_;
  std::deque<device::Event> under_way_;
};

}  // namespace sherd::engine

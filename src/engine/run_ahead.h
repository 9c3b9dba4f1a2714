#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "device/stream.h"
#include "tensor/tensor.h"

// How the rank's thread runs ahead of an accelerator: it queues micro-batch after micro-batch and looks at
// results once per step. On CPUs everything has happened when a call returns.

namespace sherd::engine {

/// Holds the rank's thread back where it is so many micro-batches ahead of an accelerator that more of them
/// would gain nothing: what is queued keeps page-locked memory (inputs, losses) until the device has passed.
class RunAhead {
 public:
  static constexpr std::size_t most = 4;  ///< micro-batches under way

  explicit RunAhead(device::Device& device) : device_(device) {}
  /// Before a micro-batch is queued: waits until fewer than `most` are under way.
  void begin();
  /// All of it has been queued.
  void end();

 private:
  device::Device& device_;
  std::deque<device::Event> under_way_;
};

}  // namespace sherd::engine

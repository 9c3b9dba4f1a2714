#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "device/stream.h"
#include "tensor/tensor.h"

// How the rank's thread runs ahead of an accelerator: it queues micro-batch after micro-batch and looks at
// results once per step. On CPUs everything has happened when a call returns.

namespace sherd::engine {

/// The losses of micro-batches, which the device may still be computing. Each is copied to memory of the
/// processor behind the work that makes it. Used from the rank's thread.
class LossReader {
 public:
  explicit LossReader(device::Device& device) : device_(device) {}
  /// Takes a loss down; does not wait.
  void add(const tensor::Tensor& loss);
  /// All losses since clear(), in double and in the order of add(). Waits for the last of them, not for
  /// work that the device was given later. Throws Error{data} for what kernels have found wrong by then.
  const std::vector<double>& values();
  void clear();

 private:
  device::Device& device_;
  std::vector<tensor::Tensor> pending_;  ///< where the processor reads them, once arrived_ is reached
  device::Event arrived_;
  std::vector<double> values_;
};

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

#pragma once

#include <memory>

#include "comm/exchange/call.h"
#include "device/accelerator.h"

namespace sherd::comm {

/// How the calls of one rank are ordered with its GPU: a call begins after what the compute stream had been
/// given when it was made, and what the stream is given after settle() begins after the call. Calls run on
/// streams beside it, and the host waits only for tensors in its own memory. Thread-safe.
class GpuOrder {
 public:
  explicit GpuOrder(std::shared_ptr<device::Accelerator> gpu) : gpu_(std::move(gpu)) {}

  const std::shared_ptr<device::Accelerator>& gpu() const { return gpu_; }

  /// On the caller's thread: looks where the call's tensors lie, and records an event on the compute stream.
  void admit(Call& call) const;
  /// On the thread that runs the call. The processor touches tensors of the host itself: waits for what fills
  /// or reads them.
  void before(const Call& call) const;
  /// On the thread that waits for the call, once it has run without error: orders the compute stream after it
  /// and lets staging go. Where tensors of the host take part, waits until the processor may touch them.
  void settle(Call& call) const;

 private:
  std::shared_ptr<device::Accelerator> gpu_;
};

/// For calls that nobody waited for: waits until no stream uses their tensors any more.
void outlast(Call& call) noexcept;

}  // namespace sherd::comm

#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base/log.h"
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
  void admit(Call& call) const {
    // By its storage: a view may begin where its storage ends, when it is empty.
    for_each_tensor(call, [&](const Tensor& x) {
      (gpu_->in_gpu_memory(x.storage().data()) ? call.gpu : call.host) = true;
    });
    if (call.gpu || call.host) call.ready = gpu_->compute_stream().record();
  }
  /// On the thread that runs the call: waits for the GPU's work that fills or reads tensors of the host,
  /// which the processor touches itself.
  void before(const Call& call) const {
    if (!call.gpu) call.ready.wait(gpu_->deadline(), describe(call));
  }
  /// On the thread that waits for the call, once it has run without error: orders the compute stream after it
  /// and lets staging go. Where tensors of the host take part, waits until the processor may touch them.
  void settle(Call& call) const {
    if (!call.done) return;
    gpu_->compute_stream().wait(call.done);
    if (call.host) call.done.wait(gpu_->deadline(), describe(call));
    call.done = {};
    call.staging.clear();
  }

 private:
  std::shared_ptr<device::Accelerator> gpu_;
};

/// Waits until no stream uses the tensors of a call that nobody waited for; memory whose work does not end in
/// a minute is never freed.
inline void outlast(Call& call) noexcept {
  if (!call.done) return;
  std::vector<device::Storage> memory;
  for_each_tensor(call, [&](const Tensor& x) { memory.push_back(x.storage()); });
  for (const Tensor& x : call.staging) memory.push_back(x.storage());
  try {
    std::exchange(call.done, {}).wait(Deadline::after_seconds(60), "work on memory that is to be freed");
  } catch (const std::exception& error) {
    log_warning("memory is never freed, for a stream may still use it: ", error.what());
    new std::vector<device::Storage>(std::move(memory));
  }
}

}  // namespace sherd::comm

#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/waits.h"
#include "comm/communicator.h"
#include "comm/exchange/call.h"
#include "comm/exchange/gpu/gpu_order.h"
#include "comm/exchange/siblings.h"
#include "device/trace_range.h"

namespace sherd::comm {

/// One asynchronous call: queued by the caller's thread, run by the group's, waited for by anyone.
class Task final : public Work::Completion {
 public:
  /// `peer`: a transfer's other rank, by its number in the world; else -1.
  Task(Call queued, double timeout_seconds, std::shared_ptr<const GpuOrder> order,
       std::shared_ptr<Siblings> siblings, int peer)
      : call(std::move(queued)),
        timeout_(timeout_seconds),
        order_(std::move(order)),
        siblings_(std::move(siblings)),
        peer_(peer),
        late_(call.deadline) {}
  ~Task() override { outlast(call); }

  bool done() override {
    std::lock_guard lock(mutex_);
    return done_ && call.done.reached();
  }

  void wait() override {
    std::optional<device::TraceRange> range;
    std::optional<WaitScope> waits;
    if (!finished()) range.emplace("wait for", call.label), waits.emplace(WaitFor::ranks);
    const Siblings::Wait told(*siblings_, finished() ? -1 : peer_);
    if (late_) late_->begin(timeout_);
    std::unique_lock lock(mutex_);
    // The running call keeps the deadline itself and says more; this one is for calls stuck behind it.
    const Deadline deadline = Deadline::after_seconds(timeout_ + 2);
    if (!finished_.wait_until(lock, deadline.at(), [&] { return done_; }))
      fail(ErrorKind::comm, describe(call), " is not done after ", timeout_,
           " s: the calls queued before it take too long");
    if (error_) std::rethrow_exception(error_);
    if (order_) order_->settle(call);
  }

  void finish(std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      // Who waits may let its memory go now: how much a rank holds shall not depend on when the group's
      // thread forgets the call. A GPU may still be at work in it.
      if (!order_) call.x = {}, call.out = {}, call.gathers.clear(), call.reduces.clear();
      done_ = true;
      error_ = std::move(error);
    }
    finished_.notify_all();
  }

  Call call;  ///< touched by the group's thread only, once queued and until it is finished

 private:
  bool finished() {
    std::lock_guard lock(mutex_);
    return done_;
  }

  double timeout_;
  std::shared_ptr<const GpuOrder> order_;  ///< null without a GPU
  std::shared_ptr<Siblings> siblings_;
  int peer_;
  std::shared_ptr<TransferDeadline> late_;  ///< a transfer's; null for others
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;         // guarded by mutex_
  std::exception_ptr error_;  // guarded by mutex_
};

}  // namespace sherd::comm

#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "device/device.h"

namespace sherd::device {

/// A moment in a queue of device work. Safe from any thread.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
  /// Whether everything queued before it has ended. Throws Error{io} when the device failed.
  virtual bool reached() const = 0;
};

/// What a Stream stands for: one queue of a device's driver. Safe from any thread.
class StreamQueue {
 public:
  virtual ~StreamQueue() = default;
  /// The moment at which everything queued so far has ended.
  virtual std::shared_ptr<const StreamEvent> record() = 0;
  /// What is queued from now on starts after `event`, of whichever queue of the process.
  virtual void follow(const StreamEvent& event) = 0;
  /// The driver's handle, for the sources that queue work.
  virtual void* native() const = 0;
};

class Stream;

/// "Everything that this stream had been given by then": the only thing that one stream can wait for of
/// another. A cheap value; it keeps neither the stream nor any memory alive.
class Mark {
 public:
  Mark() = default;
  explicit operator bool() const { return point_ != nullptr; }
  /// Whether that work has ended. An empty mark always has.
  bool reached() const;
  /// Waits for it on the calling thread. Throws Error{comm} naming `what` when the deadline passes first.
  void wait(const Deadline& deadline, std::string_view what) const;

 private:
  friend class Stream;
  struct Point;
  explicit Mark(std::shared_ptr<const Point> point) : point_(std::move(point)) {}
  std::shared_ptr<const Point> point_;
};

/// Work that a device runs in the order in which it was queued, beside its other streams. Ordering between
/// streams is said with marks and in no other way: `copies.wait(compute.mark())`. A wait that earlier waits
/// imply, also through third streams, costs nothing. A shared handle; safe from any thread.
class Stream {
 public:
  Stream() = default;
  explicit Stream(std::unique_ptr<StreamQueue> queue);
  explicit operator bool() const { return state_ != nullptr; }

  /// A mark after everything queued so far.
  Mark mark();
  /// What is queued from now on starts after `mark`'s work has ended; the calling thread does not wait. An
  /// empty mark asks for nothing.
  void wait(const Mark& mark);
  /// The driver's handle (a cudaStream_t).
  void* native() const;
  bool same_as(const Stream& other) const { return state_ == other.state_; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Memory that work on a side stream still uses. Allocators hand a freed block out again at once, in the
/// order of the compute stream; so whoever lends memory to another stream keeps it here until the compute
/// stream waits for that work.
class SideUse {
 public:
  SideUse() = default;
  SideUse(Mark done, std::vector<Storage> memory) : done_(std::move(done)), memory_(std::move(memory)) {}
  SideUse(SideUse&&) noexcept = default;
  SideUse& operator=(SideUse&& other) noexcept;
  /// Waits on this thread where nobody joined; memory whose work does not end in a minute is never freed.
  ~SideUse();

  const Mark& done() const { return done_; }
  /// `stream`, on which the memory is going to be reused, waits for the work; then the memory is let go.
  void join(Stream& stream);

 private:
  Mark done_;
  std::vector<Storage> memory_;
};

}  // namespace sherd::device

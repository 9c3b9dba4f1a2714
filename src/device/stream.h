#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>

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

/// Threads of a block, or blocks of a grid.
struct Extent3 {
  unsigned x = 1, y = 1, z = 1;
  friend bool operator==(const Extent3&, const Extent3&) = default;
};

/// A kernel with its arguments, plain values all of them, which are copied when it is queued.
struct KernelLaunch {
  const void* entry = nullptr;  ///< the function, as the driver knows it
  Extent3 grid, block;
  std::size_t shared_bytes = 0;
  std::span<void* const> arguments;
  std::span<const std::size_t> sizes;  ///< bytes of each argument
};

/// A library's call that queues work.
struct LibraryCall {
  /// Tells one operation from another, for as long as `run` or a copy of it is kept.
  const void* what = nullptr;
  /// All that its work depends on beside `what`, addresses included; copied when it is queued.
  std::span<const std::byte> key;
  /// Queues the work on the driver's handle that it is given; that may come later, more than once and on
  /// another thread. Owns what it and its work use of the host (a library's plan); memory of the device is
  /// used in the stream's order. Holds no Storage: the queue may be locked as it lets go of this, and freed
  /// page-locked memory records an event on the queue.
  std::function<void(void* native)> run;
};

/// The bytes of plain values, one after the other: a LibraryCall's key.
template <class... T>
std::array<std::byte, (sizeof(T) + ... + 0)> bytes_of(const T&... values) {
  static_assert((std::is_trivially_copyable_v<T> && ...));
  std::array<std::byte, (sizeof(T) + ... + 0)> out;
  std::size_t at = 0;
  ((std::memcpy(out.data() + at, &values, sizeof values), at += sizeof values), ...);
  return out;
}

/// How a stream's work was run, where sequences of it that come again are run as graphs.
struct GraphCounts {
  std::uint64_t graphs = 0;           ///< graphs that were made
  std::uint64_t launches = 0;         ///< runs of graphs
  std::uint64_t works_in_graphs = 0;  ///< works that these launches ran
  std::uint64_t works_apart = 0;      ///< queued one by one
};

/// The queue behind a Stream: one queue of a device's driver. Safe from any thread.
class StreamQueue {
 public:
  virtual ~StreamQueue() = default;
  /// The moment at which everything queued so far has ended.
  virtual std::shared_ptr<const StreamEvent> record() = 0;
  /// Work that is queued from now on starts after `event`, of whichever queue of the process.
  virtual void follow(const StreamEvent& event) = 0;
  /// The driver's handle, for those who queue work themselves; behind everything queued so far.
  virtual void* native() = 0;
  /// Queues a kernel. Throws Error{usage} where the device runs none.
  virtual void launch(const KernelLaunch& kernel);
  /// Queues a library's work.
  virtual void call(const LibraryCall& call) { call.run(native()); }
  /// Ends a sequence of work that comes again (Device::end_sequence).
  virtual void end_sequence() {}
};

class Stream;

/// "Everything that this stream had been given by then": the only thing that one stream can wait for of
/// another. A cheap value; it keeps neither the stream nor any memory alive.
class Event {
 public:
  Event() = default;
  explicit operator bool() const { return point_ != nullptr; }
  /// Whether that work has ended. An empty event always has.
  bool reached() const;
  /// Waits for it on the calling thread. Throws Error{comm} naming `what` when the deadline passes first.
  void wait(const Deadline& deadline, std::string_view what) const;

 private:
  friend class Stream;
  struct Point;
  explicit Event(std::shared_ptr<const Point> point) : point_(std::move(point)) {}
  std::shared_ptr<const Point> point_;
};

/// Work that a device runs in the order in which it was queued, beside its other streams. Ordering between
/// streams is said with events and in no other way: `copies.wait(compute.record())`. A wait that earlier
/// waits imply, also through third streams, costs nothing. A shared handle; safe from any thread.
class Stream {
 public:
  Stream() = default;
  explicit Stream(std::unique_ptr<StreamQueue> queue);
  explicit operator bool() const { return state_ != nullptr; }

  /// An event after everything queued so far.
  Event record();
  /// Work that is queued from now on starts after `event`'s work has ended; the calling thread does not wait.
  /// An empty event asks for nothing.
  void wait(const Event& event);
  /// The driver's handle (a cudaStream_t), behind everything queued so far.
  void* native() const;
  /// Where kernels and libraries' calls are queued. Lives as long as the stream.
  StreamQueue& queue() const;
  bool same_as(const Stream& other) const { return state_ == other.state_; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace sherd::device

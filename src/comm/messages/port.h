#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace sherd::comm {

/// How long ranks may take to come and to set up a group: they start at different speeds, and a short
/// deadline for collectives is not meant for that.
inline double setup_seconds(double timeout_seconds) {
  return std::max(60.0, timeout_seconds);
}

/// How long calls that wait for all ranks may take.
struct Patience {
  double seconds = 1800;
  std::string what;                                ///< for the error: "splitting mpi(4)"
  std::function<std::string()> trouble = nullptr;  ///< a reason to abort, or empty
};

/// A rank's place among those of its machine.
struct LocalPlace {
  int rank = 0, size = 1;
};

/// A group of processes that send each other messages: over MPI (mpi/mpi_port.cpp) or sockets (tcp/).
/// Thread-safe.
class Port {
 public:
  virtual ~Port() = default;
  /// "mpi" or "tcp": the backend in the names of groups.
  virtual std::string kind() const = 0;
  /// Calls `tell` when the process begins to exit with the port alive; it must not wait.
  virtual void on_leave(std::function<void()> tell) = 0;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::vector<int>& world_ranks() const = 0;
  virtual int world_size() const = 0;
  /// A number for each rank, equal for ranks that can share memory. The same on all ranks.
  virtual std::vector<std::uint64_t> machines() const = 0;
  /// Whether there are more ranks on this machine than cores that they may use.
  virtual bool crowded() const = 0;
  /// This rank's place among the group's of its machine.
  virtual LocalPlace place() const = 0;
  /// True when the process of `rank` has ended; over TCP also when its machine is not reached any more, and
  /// then only once everything that it sent is here. MPI knows it on this machine only; elsewhere false.
  virtual bool gone(int rank) const = 0;

  /// Collective. Null for a negative color.
  virtual std::shared_ptr<Port> split(int color, int key, const Patience& patience) = 0;
  /// Collective: a shared window with `bytes` of each rank, page-aligned; where each rank's part is seen
  /// here. It stays until the process ends. Throws Error{memory} when the machine has not that much shared
  /// memory.
  virtual std::vector<std::byte*> shared_window(std::size_t bytes, const Patience& patience) = 0;
  /// Collective: rank 0's `value`.
  virtual std::uint64_t from_first(std::uint64_t value, const Patience& patience) = 0;

  /// Collective: returns when all ranks have called it; what they wrote to shared windows before is visible.
  virtual void meet(const Patience& patience) = 0;

  /// Messages of up to 2^30 bytes; matched by peer, tag and order. The result is a handle for test().
  virtual int send(const void* data, std::size_t bytes, int to, int tag) = 0;
  virtual int receive(void* data, std::size_t bytes, int from, int tag) = 0;
  /// True once the message is done; its handle is then free.
  virtual bool test(int request) = 0;
  /// Whether the library under the port adds up elements of this type itself, in an order of its own.
  virtual bool sums(DType) const { return false; }
  /// Collective, where it does: `to` becomes this rank's block of the sum over ranks of `from`, which has one
  /// of `count` elements for every rank. The result is a handle for test().
  virtual int reduce_scatter(const void* from, void* to, std::size_t count, DType dtype);
  /// Collective, where it does: `to` becomes the sum over ranks of `from`.
  virtual int all_reduce(const void* from, void* to, std::size_t count, DType dtype);
  /// Cancels a receive. False where the port may write its buffer all the same, as MPI does with a message
  /// that was already arriving: then the memory must never be freed (keep_for_good()). Handles of messages
  /// that are done are passed over, here and in release().
  [[nodiscard]] virtual bool cancel(int request) noexcept = 0;
  /// Cancels a send: the part that has not left its buffer is sent from a copy, so that messages after it
  /// stay whole. False where the port cannot do that, and reads on. Also cancels sums, whose memory is then
  /// written as well.
  [[nodiscard]] virtual bool release(int request) noexcept = 0;

  /// One pause of a loop over test(): returns when a message may have moved since news() was `seen`, at the
  /// latest after a moment; `turn` counts the turns in vain. The result is news() as it is then.
  virtual std::uint64_t news() = 0;
  virtual std::uint64_t pause(std::uint64_t seen, int turn) = 0;

  /// Sends `text` to every other rank, without waiting.
  virtual void broadcast_failure(const std::string& text) noexcept = 0;
  /// A text that a peer sent so, or empty.
  virtual std::string poll_failure() = 0;
};

/// A chain of the values that keep_for_good() was given; never freed, for threads of libraries may be at work
/// until the process ends.
struct PinnedChain {
  PinnedChain* next = nullptr;
  static inline std::atomic<PinnedChain*> first{nullptr};
};

/// Keeps `value` as long as the process lives: memory that a library may still touch, though nobody waits for
/// it any more. Null where there is no memory for the value's place; what it owns stays all the same.
template <class T>
const T* keep_for_good(T value) noexcept {
  struct PinnedPlace : PinnedChain {
    explicit PinnedPlace(T&& kept) : value(std::move(kept)) {}
    T value;
  };
  PinnedPlace* const place = new (std::nothrow) PinnedPlace(std::move(value));
  if (!place) {
    alignas(T) std::byte forgotten[sizeof(T)];
    new (forgotten) T(std::move(value));
    return nullptr;
  }
  place->next = PinnedChain::first.load();
  while (!PinnedChain::first.compare_exchange_weak(place->next, place)) {
  }
  return &place->value;
}

}  // namespace sherd::comm

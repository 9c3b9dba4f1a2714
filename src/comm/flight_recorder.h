#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective.h"

namespace sherd::comm {

/// How far a call has come: `issued` waits for those before it, `under_way` for other ranks or for bytes.
enum class CallState : std::uint8_t { issued, under_way, done, failed };
std::string_view name_of(CallState state);

/// A communicator of several ranks, as a record tells of it.
struct RecordedGroup {
  std::string id;    ///< the same on all its ranks: "world", "world.3" for the third that was split from it
  std::string name;  ///< "tcp(4 of 8: ranks 0, 2, 4, 6)"
  std::string purpose;         ///< "shard, data"; empty: nobody has said
  std::vector<int> ranks;      ///< by their numbers in the world
  std::uint64_t issued = 0;    ///< collectives that this rank has called
  std::uint64_t finished = 0;  ///< the number of the last one that has ended here
};

/// A call, as a record tells of it. Times are microseconds of the steady clock; 0: not yet.
struct RecordedCall {
  std::uint64_t number = 0;    ///< grows with each call of the rank
  std::size_t group = 0;       ///< which of the record's
  std::uint64_t sequence = 0;  ///< among the group's collectives, or the transfers of a pair and direction
  Collective kind = Collective::none;
  CallState state = CallState::issued;
  int peer = -1;            ///< the other rank of a transfer, or the root, by its number in the world
  std::uint64_t bytes = 0;  ///< of the whole tensors
  std::string label;        ///< its first characters
  std::int64_t issued_us = 0, begun_us = 0, ended_us = 0;
  /// The ranks of the world that it was last seen to wait for: the first few, and how many there are.
  std::vector<int> missing;
  int missing_count = 0;
};

/// A rank's last calls, oldest first, and its groups.
struct FlightRecord {
  int rank = 0, world_size = 1;
  std::vector<RecordedGroup> groups;
  std::vector<RecordedCall> calls;
};

/// The last calls that a rank has made of all its communicators, so that it can be told where it stands when
/// it hangs. Always on: a call costs some stores and looks at the clock, and waits for nobody. All groups
/// that were split from one world share one.
class FlightRecorder {
  struct Entry;

 public:
  static constexpr std::size_t kept = 200, label_bytes = 64, missing_kept = 8;

  FlightRecorder();
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// A communicator whose calls are recorded. Its calls are issued from one thread at a time.
  class Group {
   public:
    Group(std::string id, std::string name, std::vector<int> ranks);

   private:
    friend class FlightRecorder;
    std::uint64_t next(Collective kind, int peer);

    const std::string id_, name_;
    const std::vector<int> ranks_;
    std::string purpose_;  ///< guarded by the recorder's mutex_
    std::uint32_t number_ = 0;
    std::atomic<std::uint64_t> issued_{0}, finished_{0};
    std::vector<std::uint64_t> sends_, receives_;  ///< transfers, by rank of the group
  };
  /// Adds a group, in which this rank has the number `rank`. The first one is the world.
  std::shared_ptr<Group> add(std::string id, std::string name, std::vector<int> ranks, int rank);
  void set_purpose(Group& group, const std::string& purpose);

  /// A call's place in the recorder, which must outlive it; empty: the call is not recorded. Thread-safe.
  class Ticket {
   public:
    Ticket() = default;
    void begin() const noexcept;
    void end(bool well) const noexcept;
    /// Records that the call now waits for `count` ranks of the world, the first of which are in `ranks`.
    void wait_for(std::span<const int> ranks, std::size_t count) const noexcept;
    void wait_for(std::span<const int> ranks) const noexcept { wait_for(ranks, ranks.size()); }
    explicit operator bool() const { return entry_ != nullptr; }

   private:
    friend class FlightRecorder;
    void move_to(CallState state) const noexcept;
    bool holds() const noexcept;

    Entry* entry_ = nullptr;
    Group* group_ = nullptr;
    std::uint64_t number_ = 0, sequence_ = 0;
    bool transfer_ = false;
  };

  struct Issued {
    Collective kind = Collective::none;
    int peer = -1, world_peer = -1;  ///< the same rank, by its numbers in the group and in the world
    std::uint64_t bytes = 0;
    std::string_view label;
  };
  Ticket issue(Group& group, const Issued& call) noexcept;

  /// From any thread.
  FlightRecord record() const;

  /// Is told why, once, when a group of the rank fails or the rank does. It is called on the thread that
  /// learns of it, and must not throw. In place of the one before.
  void on_failure(std::function<void(const std::string& reason)> tell);
  void tell_failure(const std::string& reason) noexcept;

 private:
  void forget_groups();

  std::unique_ptr<Entry[]> entries_;
  std::atomic<std::uint64_t> calls_{0};
  mutable std::mutex mutex_;  ///< not taken by calls
  // Guarded by mutex_:
  std::vector<std::shared_ptr<Group>> groups_;
  std::uint32_t groups_made_ = 0;
  int rank_ = 0, world_size_ = 0;
  std::function<void(const std::string&)> tell_;
  bool told_ = false;
};

}  // namespace sherd::comm

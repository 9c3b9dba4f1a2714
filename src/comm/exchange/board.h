#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/exchange/announcements.h"
#include "comm/exchange/call.h"
#include "comm/exchange/health.h"
#include "comm/exchange/turns.h"

namespace sherd::comm {

/// Where a peer finds bytes: a region (a shared window, or the notice's own payload) and an offset in it.
struct Address {
  static constexpr std::uint64_t hidden = ~std::uint64_t{0};         ///< peers cannot reach it: stage
  static constexpr std::uint64_t in_notice = ~std::uint64_t{0} - 1;  ///< in the notice's payload
  std::uint64_t region = hidden, offset = 0;
};

/// What a rank publishes for one round of a collective.
struct Notice {
  static constexpr int max_addresses = 256;
  static constexpr int max_ranks = 256;
  static constexpr std::size_t payload_bytes = 4096;
  Signature signature;
  std::array<Address, max_addresses> addresses;
  std::array<std::int64_t, 2 * max_ranks> counts;
  alignas(64) std::array<std::byte, payload_bytes> payload;
};

/// A word to sleep on. Ringing costs no system call while nobody sleeps.
struct Bell {
  std::atomic<std::uint32_t> count{0}, sleepers{0};
};

/// One transfer on its way from a rank to another.
struct Letter {
  Signature signature;
  Address address;
};

/// The transfers of one ordered pair of ranks. The sender writes `posted` and `filled`, the receiver the
/// others.
struct Channel {
  static constexpr std::uint64_t capacity = 8;
  alignas(64) std::atomic<std::uint64_t> posted{0};  ///< letters written
  std::atomic<std::uint64_t> filled{0};              ///< bytes written to the ring, in all
  alignas(64) std::atomic<std::uint64_t> taken{0};   ///< letters whose data has arrived
  std::atomic<std::uint64_t> drained{0};             ///< bytes read from the ring, in all
  alignas(64) std::array<Letter, capacity> letters;
};

/// One rank's part of the board. It alone writes its notices.
struct Slot {
  alignas(64) std::atomic<std::uint64_t> arrived{0};  ///< barriers come to
  std::atomic<std::uint32_t> departed{0};
  alignas(64) Bell bell;  ///< rung when one of this rank's transfers moved
  std::array<Notice, 2> notices;
  Announcements announced;
};

/// What the ranks of a board share beside their slots.
struct BoardHeader {
  static constexpr std::size_t text_bytes = 4000;
  alignas(64) std::atomic<std::uint64_t> arrivals{0};
  alignas(64) std::atomic<std::uint64_t> completed{0};  ///< barriers that everybody has come to
  Bell bell;                                            ///< rung when a barrier completes
  alignas(64) std::atomic<std::uint32_t> failure{0};    ///< 0 none, 1 being written, 2 written
  std::array<char, text_bytes> text;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "the board lives in memory shared by processes");

/// Sizes of the shared memory; the same on all ranks.
struct BoardLayout {
  int ranks = 1;
  std::size_t stage_bytes = 0;  ///< per half; 0 where no tensor is ever hidden
  std::size_t ring_bytes = 0;   ///< per ordered pair
  std::size_t segment_bytes() const;
};

/// How a rank waits, and for whom.
struct BoardSettings {
  std::string name;  ///< for messages: "mpi(4)"
  double timeout_seconds = 1800;
  bool crowded = false;            ///< more ranks than cores: yield rather than spin
  std::function<bool(int)> gone;   ///< true when a rank's process has ended; null where that cannot be known
  std::shared_ptr<Health> parent;  ///< its failure is ours too
};

/// Shared memory on which the ranks of a group meet: barriers, notices, letters, and the group's failure.
/// Every wait spins briefly, then sleeps on a futex; it ends with Error{comm} at the deadline, when a missing
/// rank has left or died, and when the group has failed. Each rank (thread or process) has its own Board over
/// the same memory; one thread at a time waits in it, while fail() may come from any thread.
class Board final : public Health {
 public:
  /// segments[r] is rank r's part, segment_bytes() each, of which this rank's has been set up by prepare().
  /// The memory must outlive the board.
  Board(int rank, const BoardLayout& layout, std::vector<std::byte*> segments, BoardSettings settings);
  /// Constructs the objects in a rank's own segment; before any rank makes its Board.
  static void prepare(std::byte* segment, const BoardLayout& layout);

  int rank() const { return rank_; }
  int size() const { return layout_.ranks; }
  const std::string& name() const { return settings_.name; }
  double timeout() const { return settings_.timeout_seconds; }

  /// Waits for all ranks. What they wrote before is visible after.
  void barrier(const Call& call);

  /// Sleeps until done() is true; `missing` lists the ranks that it depends on. Rung through `bell`.
  template <class Done, class Missing>
  void wait(Bell& bell, const Done& done, const Missing& missing, const Call& call, const Deadline& deadline);

  /// As Backend's.
  std::uint64_t announce(const Signature& call);
  std::vector<int> not_announced(std::uint64_t number) const;

  Notice& notice(int rank, std::uint64_t round) { return slot(rank).notices[round % 2]; }
  Channel& channel(int from, int to);
  std::byte* ring(int from, int to);
  std::size_t ring_bytes() const { return layout_.ring_bytes; }
  std::byte* stage(int rank, std::uint64_t chunk);
  std::size_t stage_bytes() const { return layout_.stage_bytes; }
  Bell& bell(int rank) { return slot(rank).bell; }
  static void ring_bell(Bell& bell) noexcept;

  /// Records why the group failed (the first caller's reason stays) and wakes everybody.
  void fail(const std::string& reason) noexcept;
  [[noreturn]] void fail_and_throw(const std::string& reason);
  [[noreturn]] void throw_failure() const;
  bool failed() const noexcept override;
  std::string failure() const override;
  /// Fails the group if a rank's process has ended. From any thread.
  void look_after_peers() noexcept;
  /// This rank will make no more calls; those who wait for it end now.
  void depart() noexcept;

 private:
  friend struct BoardLayout;
  struct Places;
  BoardHeader& header() const;
  Slot& slot(int rank) const;
  std::byte* place(int rank, std::size_t offset) const {
    return segments_[static_cast<std::size_t>(rank)] + offset;
  }
  void nap(Bell& bell, std::uint32_t ticket, const Deadline& deadline) const;
  /// The text of the failure that `missing` and the clock amount to, or empty.
  std::string diagnose(const std::vector<int>& missing, const Call& call, const Deadline& deadline,
                       bool slow_checks);

  int rank_;
  BoardLayout layout_;
  std::vector<std::byte*> segments_;
  BoardSettings settings_;
  std::uint64_t barriers_ = 0;  ///< of this rank
  int spins_, yields_;
  Turns turns_;
};

/// Tells the processor that this is a spin loop.
void spin_pause() noexcept;

template <class Done, class Missing>
void Board::wait(Bell& bell, const Done& done, const Missing& missing, const Call& call,
                 const Deadline& deadline) {
  for (int i = 0; i < spins_; ++i) {
    if (done()) return;
    spin_pause();
  }
  for (int i = 0; i < yields_; ++i) {
    if (done()) return;
    if (!turns_.yield()) break;
  }
  for (bool slow_checks = false;; slow_checks = true) {
    const std::uint32_t ticket = bell.count.load();
    if (done()) return;
    // What is being waited for may come at the last moment before its rank leaves or the group fails: look
    // again.
    if (failed()) {
      if (done()) return;
      throw_failure();
    }
    const std::string reason = diagnose(missing(), call, deadline, slow_checks);
    if (!reason.empty()) {
      if (done()) return;
      fail_and_throw(reason);
    }
    nap(bell, ticket, deadline);
  }
}

}  // namespace sherd::comm

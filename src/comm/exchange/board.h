#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/waits.h"
#include "comm/exchange/call.h"
#include "comm/exchange/descriptor.h"
#include "comm/exchange/waiting.h"

namespace sherd::comm {

/// One rank's part of the board. It alone writes its descriptors.
struct RankSlot {
  alignas(64) std::atomic<std::uint64_t> arrived{0};  ///< barriers come to
  std::atomic<std::uint32_t> departed{0};
  std::atomic<std::uint32_t> asks_elsewhere{0};  ///< waits for ranks of other machines
  std::atomic<std::int32_t> waits_for{-1};  ///< rank of the world for whose transfer this one's thread waits
  alignas(64) WaitWord moved;               ///< one of this rank's transfers moved
  std::array<CallDescriptor, 2> descriptors;
  Announcements announced;
};

/// State that the ranks of a board share beside their slots.
struct BoardHeader {
  static constexpr std::size_t text_bytes = 4000;
  alignas(64) std::atomic<std::uint64_t> arrivals{0};
  alignas(64) std::atomic<std::uint64_t> completed{0};  ///< barriers that everybody has come to
  WaitWord met;                                         ///< a barrier completed
  alignas(64) std::atomic<std::uint32_t> failure{0};    ///< 0 none, 1 being written, 2 written
  std::array<char, text_bytes> text;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "the board lives in memory shared by processes");

/// Sizes of the shared memory; the same on all ranks.
struct BoardLayout {
  static constexpr int max_ranks = 256;
  /// stage_bytes of groups on one machine, and of those that span machines, whose messages carry a chunk.
  static constexpr std::size_t stage = std::size_t{512} << 10, spanning_stage = std::size_t{2} << 20;
  int ranks = 1;
  std::size_t stage_bytes = 0;  ///< per half; 0 where no tensor is ever hidden
  std::size_t ring_bytes = 0;   ///< per ordered pair
  /// The layout for processes, whose tensors may be hidden. `spans`: the group has ranks on other machines
  /// too.
  static BoardLayout of_processes(int ranks, bool spans);
  std::size_t segment_bytes() const;
  /// Memory of this process for so many segments.
  std::shared_ptr<std::byte> allocate(int segments) const;
};

/// Whether a group still works. A failed group stays failed; its sub-groups fail with it. Thread-safe.
class Health {
 public:
  virtual ~Health() = default;
  virtual bool failed() const noexcept = 0;
  /// The first failure's text, the same on all ranks; empty while all is well.
  virtual std::string failure() const = 0;
};

/// How a rank waits, and for whom.
struct BoardSettings {
  std::string name;        ///< the group's, for messages: "mpi(4)"
  std::vector<int> ranks;  ///< the board's ranks by their numbers in the group
  std::vector<int> world;  ///< the group's ranks by their numbers in the world
  double timeout_seconds = 1800;
  bool crowded = false;            ///< more ranks than cores: yield rather than spin
  std::function<bool(int)> gone;   ///< true when a rank's process has ended; null where that cannot be known
  std::shared_ptr<Health> parent;  ///< its failure is ours too
  /// Tells ranks that are not on this board of a failure; null where all are.
  std::function<void(const std::string&)> tell_failure;
  /// Moves messages on while this rank waits here; true while some are under way. Null without messages.
  std::function<bool()> progress;
  std::shared_ptr<const void> memory;  ///< the owner of the segments; null where they stay mapped
};

/// Shared memory on which ranks of one machine meet: barriers, descriptors, message slots, and the group's
/// failure. Every wait spins briefly, then sleeps on a futex; it ends with Error{comm} at the deadline, when
/// a missing rank has left or died, and when the group has failed. Each rank (thread or process) has its own
/// Board over the same memory; one thread at a time waits in it, while fail() may come from any thread.
class Board final : public Health {
 public:
  /// segments[r] is rank r's part, segment_bytes() each, of which this rank's has been set up by prepare().
  Board(int rank, const BoardLayout& layout, std::vector<std::byte*> segments, BoardSettings settings);
  /// Constructs the objects in a rank's own segment; before any rank makes its Board.
  static void prepare(std::byte* segment, const BoardLayout& layout);

  /// Ranks count those of the board here and below; errors name them by their numbers in the world.
  int rank() const { return rank_; }
  int size() const { return layout_.ranks; }
  const std::string& name() const { return settings_.name; }
  double timeout() const { return settings_.timeout_seconds; }

  /// Waits for all ranks. What they wrote before is visible after.
  void barrier(const Call& call);

  /// A wait: the call that it is for, the ranks that it waits for, and until when.
  struct Waited {
    const Call& call;
    std::vector<int> missing;
    Deadline deadline;
    bool late = deadline.passed();  ///< when `missing` was looked for
  };
  /// Sleeps until done() is true. Woken through `word`; looks at what waited() says from time to time.
  template <class Done, class WaitedFor>
  void wait(WaitWord& word, const Done& done, const WaitedFor& waited);

  /// While it lives this rank waits for ranks that are not on this board. Ranks of the board that wait for
  /// this one let it report first at the deadline, as it knows which rank is missing.
  class WaitElsewhere {
   public:
    explicit WaitElsewhere(Board& board) : flag_(board.slot(board.rank_).asks_elsewhere) { flag_ = 1; }
    ~WaitElsewhere() { flag_ = 0; }
    WaitElsewhere(const WaitElsewhere&) = delete;
    WaitElsewhere& operator=(const WaitElsewhere&) = delete;

   private:
    std::atomic<std::uint32_t>& flag_;
  };

  /// As Backend's.
  int world_rank(int group_rank) const { return settings_.world[static_cast<std::size_t>(group_rank)]; }
  void tell_wait(int world_rank) noexcept { slot(rank_).waits_for.store(world_rank); }
  std::uint64_t announce(const CallSignature& call);
  std::vector<int> not_announced(std::uint64_t number) const;

  CallDescriptor& descriptor(int rank, std::uint64_t round) { return slot(rank).descriptors[round % 2]; }
  PairChannel& channel(int from, int to);
  std::byte* ring(int from, int to);
  std::size_t ring_bytes() const { return layout_.ring_bytes; }
  std::byte* stage(int rank, std::uint64_t chunk);
  std::size_t stage_bytes() const { return layout_.stage_bytes; }
  WaitWord& moved(int rank) { return slot(rank).moved; }

  /// Records why the group failed (the first caller's reason stays), wakes everybody here and tells the
  /// others.
  void fail(const std::string& reason) noexcept;
  [[noreturn]] void fail_and_throw(const std::string& reason);
  /// Fails the group and throws, with the group's name before `wrong`, unless `wrong` is empty.
  void fail_if(const std::string& wrong);
  [[noreturn]] void throw_failure() const;
  bool failed() const noexcept override;
  /// The reason as this rank first learned it.
  std::string failure() const override;
  /// Fails the group if a rank's process has ended. From any thread.
  void look_after_peers() noexcept;
  /// This rank will make no more calls; those who wait for it end now.
  void depart() noexcept;

 private:
  friend struct BoardLayout;
  struct Places;
  BoardHeader& header() const;
  RankSlot& slot(int rank) const;
  std::byte* place(int rank, std::size_t offset) const {
    return segments_[static_cast<std::size_t>(rank)] + offset;
  }
  int in_group(int rank) const { return settings_.ranks[static_cast<std::size_t>(rank)]; }
  int in_world(int rank) const { return world_rank(in_group(rank)); }
  std::string shared_failure() const;
  void nap(WaitWord& word, std::uint32_t seen, const Deadline& deadline) const;
  std::vector<int> waits_behind(int rank) const;
  std::string name_late_ranks(const std::vector<int>& missing) const;
  bool may_hear_more(const std::vector<int>& missing, const Deadline& deadline) const;
  /// Tells the call's record for whom it waits.
  void record(const Waited& waited) const;
  /// The error message for a wait that has failed, or is too late; else empty.
  std::string diagnose(const Waited& waited, bool slow_checks);

  int rank_;
  BoardLayout layout_;
  std::vector<std::byte*> segments_;
  BoardSettings settings_;
  std::uint64_t barriers_ = 0;  ///< barriers that this rank has come to
  int spins_, yields_;
  Backoff backoff_;
  mutable std::mutex failure_mutex_;
  mutable std::string first_failure_;  // guarded by failure_mutex_
};

template <class Done, class WaitedFor>
void Board::wait(WaitWord& word, const Done& done, const WaitedFor& waited) {
  if (done()) return;
  const WaitScope waits(WaitFor::ranks);
  for (int i = 0; i < spins_; ++i) {
    if (done()) return;
    spin_pause();
  }
  for (int i = 0; i < yields_; ++i) {
    if (done()) return;
    if (!backoff_.yield()) break;
  }
  for (bool slow_checks = false;; slow_checks = true) {
    const std::uint32_t seen = word.count.load();
    if (done()) return;
    // The awaited event may come at the last moment before its rank leaves or the group fails: look
    // again.
    if (failed()) {
      if (done()) return;
      throw_failure();
    }
    const Waited now = waited();
    record(now);
    const std::string reason = diagnose(now, slow_checks);
    if (!reason.empty()) {
      if (done()) return;
      fail_and_throw(reason);
    }
    nap(word, seen, now.deadline);
  }
}

}  // namespace sherd::comm

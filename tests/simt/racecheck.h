#pragma once

// Finds data races of emulated kernels: two accesses to the same memory by different threads, at least one of
// them a write, neither atomic both, and nothing that orders them. Within a block a barrier of the block
// orders, within a warp __syncwarp() too; shuffles and votes do not, and blocks of one launch never are
// ordered. All memory is watched, shared and global. So a race is found although the emulator runs one thread
// at a time, and whichever order it takes.
//
// Kernels are compiled with -fsanitize=thread, which calls a function at every access; racecheck.cpp defines
// these functions. Where they are not (in builds with a sanitizer of their own) nothing is found. Not seen:
// accesses of single bytes, what the compiler has merged or removed, and a write that __syncwarp() of part of
// a warp orders after two of three or more lanes of this warp that have read there, and not after the others.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace sherd::simt {

/// Watches one launch at a time. Used by the host thread that runs it.
class RaceCheck {
 public:
  RaceCheck();
  ~RaceCheck();
  RaceCheck(const RaceCheck&) = delete;
  RaceCheck& operator=(const RaceCheck&) = delete;

  /// The calling host thread's check while a kernel runs on it; else null.
  static RaceCheck* current();

  /// Without `watch` nothing is looked at until the launch ends.
  void begin_launch(bool watch);
  void begin_block(std::uint64_t block, std::size_t threads);
  /// From now on `thread` of the block runs, on a stack that nobody else reads.
  void run_thread(std::size_t thread, const void* stack, std::size_t stack_bytes);
  /// All threads have reached a barrier of the block.
  void pass_barrier() { ++barrier_; }
  /// The lanes of `mask` have met in __syncwarp().
  void pass_warp_barrier(std::size_t warp, unsigned mask);
  /// A block's shared memory begins: what other blocks did there does not concern it.
  void forget(const void* memory, std::size_t bytes);
  /// Ends the launch, or gives it up; says what race was found first, or nothing.
  std::string end_launch();

  void access(const void* memory, std::size_t bytes, bool write, bool atomic, const void* code);

 private:
  /// One access: who and when.
  struct Access {
    std::uint64_t thread : 10 = 0, block : 20 = 0, barrier : 16 = 0, lane_epoch : 16 = 0, atomic : 1 = 0,
                           there : 1 = 0;
  };
  /// The accesses to some bytes: the last write, and since then reads, or atomic accesses beside an atomic
  /// write, by two threads: from different warps or blocks where there are such, which then stand for all.
  struct Cell {
    Access write, others[2];
  };
  struct Page;
  /// The order among a warp's lanes: known[l][j] is the latest epoch of j that precedes l's present.
  struct Warp {
    std::uint16_t known[32][32], epoch[32];
  };

  inline bool precedes(const Access& earlier) const;
  inline bool collides(const Access& earlier) const;
  inline Page& page_at(std::uintptr_t number);
  Page& fresh_page_at(std::uintptr_t number);
  inline void touch(Cell& cell, bool write, const void* memory, const void* code);
  void touch_atomically(Cell& cell, bool write, const void* memory, const void* code);
  inline void note_other(Cell& cell);
  void report(const Access& earlier, bool earlier_wrote, bool write, const void* memory, const void* code);

  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages_;
  std::vector<Warp> warps_;
  Page* recent_[64] = {};
  std::uintptr_t stack_ = 0, stack_end_ = 0;
  std::uint64_t launch_ = 0;
  std::uint32_t barrier_ = 0;
  Access now_{};
  std::string found_;
};

/// Watching takes more time than all else: programs that test other things than kernels turn it off for
/// themselves.
void find_races(bool on);
/// Whether this build's kernels are watched.
bool finds_races();

}  // namespace sherd::simt

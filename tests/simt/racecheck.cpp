#include "simt/racecheck.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace sherd::simt {
namespace {

constexpr std::uintptr_t page_bytes = 4096, word_bytes = 4, half_bytes = 2;
constexpr std::size_t most_pages = 4096;

thread_local constinit RaceCheck* watching = nullptr;
std::atomic<bool> wanted = true;

}  // namespace

/// Four bytes have a cell; or two halves have one each once one of them has been accessed without the other.
struct RaceCheck::Page {
  std::uintptr_t number = 0;
  std::uint64_t launch = 0;
  bool split[page_bytes / word_bytes];
  Cell cells[page_bytes / word_bytes];   ///< of words, or of first halves
  Cell second[page_bytes / word_bytes];  ///< of second halves, where split
};

RaceCheck::RaceCheck() = default;
RaceCheck::~RaceCheck() = default;

void find_races(bool on) {
  wanted = on;
}

RaceCheck* RaceCheck::current() {
  return watching;
}

void RaceCheck::begin_launch(bool watch) {
  if (pages_.size() > most_pages) pages_.clear(), std::fill(std::begin(recent_), std::end(recent_), nullptr);
  ++launch_, found_.clear();
  watching = watch && wanted ? this : nullptr;
}

void RaceCheck::begin_block(std::uint64_t block, std::size_t threads) {
  now_ = {};
  now_.block = block & 0xfffffu, now_.there = 1;
  barrier_ = 0;
  warps_.resize((threads + 31) / 32);
  for (Warp& warp : warps_) {
    std::memset(&warp, 0, sizeof warp);
    std::fill(std::begin(warp.epoch), std::end(warp.epoch), std::uint16_t{1});
  }
}

void RaceCheck::run_thread(std::size_t thread, const void* stack, std::size_t stack_bytes) {
  now_.thread = thread & 0x3ffu;
  stack_ = reinterpret_cast<std::uintptr_t>(stack), stack_end_ = stack_ + stack_bytes;
}

void RaceCheck::pass_warp_barrier(std::size_t warp_index, unsigned mask) {
  Warp& warp = warps_[warp_index];
  std::uint16_t all[32] = {};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    for (unsigned other = 0; other < 32; ++other)
      all[other] =
          std::max({all[other], warp.known[lane][other], other == lane ? warp.epoch[lane] : all[other]});
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    std::copy(std::begin(all), std::end(all), warp.known[lane]);
    ++warp.epoch[lane];
  }
}

RaceCheck::Page& RaceCheck::fresh_page_at(std::uintptr_t number) {
  Page*& recent = recent_[number % std::size(recent_)];
  if (!recent || recent->number != number) {
    std::unique_ptr<Page>& page = pages_[number];
    if (!page) page.reset(new Page), page->number = number, page->launch = 0;
    recent = page.get();
  }
  if (recent->launch != launch_) {
    std::memset(static_cast<void*>(recent->cells), 0, sizeof recent->cells);
    std::memset(recent->split, 0, sizeof recent->split);
    recent->launch = launch_;
  }
  return *recent;
}

inline RaceCheck::Page& RaceCheck::page_at(std::uintptr_t number) {
  Page* recent = recent_[number % std::size(recent_)];
  if (recent && recent->number == number && recent->launch == launch_) [[likely]]
    return *recent;
  return fresh_page_at(number);
}

void RaceCheck::forget(const void* memory, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(memory);
  for (std::uintptr_t at = first; at < first + bytes; at += word_bytes) {
    Page& page = page_at(at / page_bytes);
    const std::uintptr_t word = at % page_bytes / word_bytes;
    page.cells[word] = {}, page.split[word] = false;
  }
}

std::string RaceCheck::end_launch() {
  watching = nullptr;
  return std::exchange(found_, {});
}

// Accesses are compared as whole numbers, and what nearly all of them need stands in access(): nearly all
// time goes here.
inline bool RaceCheck::precedes(const Access& earlier) const {
  const auto bits = [](const Access& access) { return std::bit_cast<std::uint64_t>(access); };
  const std::uint64_t differs = bits(earlier) ^ bits(now_);
  if (differs & bits({.block = 0xfffff})) return false;
  if (!(differs & bits({.thread = 0x3ff})) || differs & bits({.barrier = 0xffff})) return true;
  if (differs & bits({.thread = 0x3e0})) return false;
  return warps_[now_.thread / 32].known[now_.thread % 32][earlier.thread % 32] >= earlier.lane_epoch;
}

inline bool RaceCheck::collides(const Access& earlier) const {
  return earlier.there && !(earlier.atomic && now_.atomic) && !precedes(earlier);
}

void RaceCheck::access(const void* memory, std::size_t bytes, bool write, bool atomic, const void* code) {
  const auto first = reinterpret_cast<std::uintptr_t>(memory);
  if (bytes < half_bytes || (first >= stack_ && first < stack_end_)) return;
  now_.barrier = barrier_ & 0xffffu, now_.atomic = atomic;
  now_.lane_epoch = warps_[now_.thread / 32].epoch[now_.thread % 32];
  for (std::uintptr_t at = first; at < first + bytes;) {
    Page& page = page_at(at / page_bytes);
    const std::uintptr_t page_end = std::min(first + bytes, (at / page_bytes + 1) * page_bytes);
    while (at < page_end) {
      const std::uintptr_t end = std::min(page_end, (at / word_bytes + 1) * word_bytes),
                           word = at % page_bytes / word_bytes, from = at % word_bytes, of_word = end - at;
      if (of_word < word_bytes && !page.split[word])
        page.second[word] = page.cells[word], page.split[word] = true;
      if (from < half_bytes) touch(page.cells[word], write, memory, code);
      if (page.split[word] && from + of_word > half_bytes) touch(page.second[word], write, memory, code);
      at = end;
    }
  }
}

inline void RaceCheck::touch(Cell& cell, bool write, const void* memory, const void* code) {
  const auto bits = [](const Access& access) { return std::bit_cast<std::uint64_t>(access); };
  // Once more what was read since the last write.
  if (!write && (bits(cell.others[0]) == bits(now_) || bits(cell.others[1]) == bits(now_))) return;
  const std::uint64_t any = bits(cell.write) | bits(cell.others[0]) | bits(cell.others[1]) | bits(now_);
  if (any & bits({.atomic = 1})) return touch_atomically(cell, write, memory, code);
  if (cell.write.there && !precedes(cell.write)) report(cell.write, true, write, memory, code);
  if (write) {
    for (const Access& other : cell.others)
      if (other.there && !precedes(other)) report(other, false, write, memory, code);
    cell = {.write = now_, .others = {}};
    return;
  }
  note_other(cell);
}

void RaceCheck::touch_atomically(Cell& cell, bool write, const void* memory, const void* code) {
  if (collides(cell.write)) report(cell.write, true, write, memory, code);
  for (const Access& other : cell.others)
    if ((write || other.atomic) && collides(other)) report(other, other.atomic, write, memory, code);
  if (write && (!now_.atomic || !cell.write.there || precedes(cell.write))) {
    cell.write = now_;
    for (Access& other : cell.others)
      if (!now_.atomic || precedes(other)) other = {};
    return;
  }
  note_other(cell);
}

inline void RaceCheck::note_other(Cell& cell) {
  for (Access& other : cell.others)
    if (!other.there || precedes(other)) {
      other = now_;
      return;
    }
  // One of two warps or blocks at least is not the later write's, and only a barrier of the block orders
  // that.
  const auto same_warp = [](const Access& a, const Access& b) {
    const Access who{.thread = 0x3e0, .block = 0xfffff};
    return ((std::bit_cast<std::uint64_t>(a) ^ std::bit_cast<std::uint64_t>(b)) &
            std::bit_cast<std::uint64_t>(who)) == 0;
  };
  if (same_warp(cell.others[0], cell.others[1]) && !same_warp(cell.others[0], now_)) cell.others[1] = now_;
}

void RaceCheck::report(const Access& earlier, bool earlier_wrote, bool write, const void* memory,
                       const void* code) {
  if (!found_.empty()) return;
  found_ = cat("simt: a race: thread ", now_.thread, " of block ", now_.block, write ? " writes" : " reads",
               " at ", memory, " what thread ", earlier.thread, " of block ", earlier.block,
               earlier_wrote ? " wrote" : " read", ", and no barrier lies between them");
  Dl_info program{};
  if (dladdr(code, &program) && program.dli_fname) {
    const auto offset =
        reinterpret_cast<std::uintptr_t>(code) - reinterpret_cast<std::uintptr_t>(program.dli_fbase);
    found_ += cat("; see addr2line -Cife ", program.dli_fname, " 0x", std::hex, offset - 1);
  }
}

}  // namespace sherd::simt

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
bool sherd::simt::finds_races() {
  return false;
}
#else
bool sherd::simt::finds_races() {
  return true;
}

// ---- what -fsanitize=thread makes of the kernels' accesses ----

namespace {

inline void note(const void* memory, std::size_t bytes, bool write, const void* code) {
  if (sherd::simt::RaceCheck* check = sherd::simt::watching) [[unlikely]]
    check->access(memory, bytes, write, false, code);
}

}  // namespace

#define NOTE(name, bytes, write)                             \
  void name(void* memory);                                   \
  void name(void* memory) {                                  \
    note(memory, bytes, write, __builtin_return_address(0)); \
  }
#define NOTE_RANGE(name, write)                              \
  void name(void* memory, std::size_t bytes);                \
  void name(void* memory, std::size_t bytes) {               \
    note(memory, bytes, write, __builtin_return_address(0)); \
  }
#define NOTHING(name) \
  void name(void*);   \
  void name(void*) {}

/// The kernels' hosts share counters of handles with the rest of the program, so these must be what they say.
#define ATOMICS(bits, type)                                     \
  type __tsan_atomic##bits##_load(const type* at, int);         \
  type __tsan_atomic##bits##_load(const type* at, int) {        \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);               \
  }                                                             \
  void __tsan_atomic##bits##_store(type* at, type value, int);  \
  void __tsan_atomic##bits##_store(type* at, type value, int) { \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);              \
  }                                                             \
  ATOMIC_UPDATE(bits, type, exchange, __atomic_exchange_n)      \
  ATOMIC_UPDATE(bits, type, fetch_add, __atomic_fetch_add)      \
  ATOMIC_UPDATE(bits, type, fetch_sub, __atomic_fetch_sub)      \
  ATOMIC_UPDATE(bits, type, fetch_and, __atomic_fetch_and)      \
  ATOMIC_UPDATE(bits, type, fetch_or, __atomic_fetch_or)        \
  ATOMIC_UPDATE(bits, type, fetch_xor, __atomic_fetch_xor)      \
  ATOMIC_COMPARE(bits, type, compare_exchange_strong)           \
  ATOMIC_COMPARE(bits, type, compare_exchange_weak)
#define ATOMIC_UPDATE(bits, type, name, builtin)                 \
  type __tsan_atomic##bits##_##name(type* at, type value, int);  \
  type __tsan_atomic##bits##_##name(type* at, type value, int) { \
    return builtin(at, value, __ATOMIC_SEQ_CST);                 \
  }
#define ATOMIC_COMPARE(bits, type, name)                                                                \
  int __tsan_atomic##bits##_##name(type* at, type* expected, type value, int, int);                     \
  int __tsan_atomic##bits##_##name(type* at, type* expected, type value, int, int) {                    \
    return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {
void __tsan_init();
void __tsan_init() {}
NOTHING(__tsan_func_entry)
void __tsan_func_exit();
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*);
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**);
void __tsan_vptr_read(void**) {}
NOTE(__tsan_read1, 1, false)
NOTE(__tsan_read2, 2, false)
NOTE(__tsan_read4, 4, false)
NOTE(__tsan_read8, 8, false)
NOTE(__tsan_read16, 16, false)
NOTE(__tsan_write1, 1, true)
NOTE(__tsan_write2, 2, true)
NOTE(__tsan_write4, 4, true)
NOTE(__tsan_write8, 8, true)
NOTE(__tsan_write16, 16, true)
NOTE(__tsan_unaligned_read2, 2, false)
NOTE(__tsan_unaligned_read4, 4, false)
NOTE(__tsan_unaligned_read8, 8, false)
NOTE(__tsan_unaligned_read16, 16, false)
NOTE(__tsan_unaligned_write2, 2, true)
NOTE(__tsan_unaligned_write4, 4, true)
NOTE(__tsan_unaligned_write8, 8, true)
NOTE(__tsan_unaligned_write16, 16, true)
NOTE_RANGE(__tsan_read_range, false)
NOTE_RANGE(__tsan_write_range, true)
ATOMICS(8, std::uint8_t)
ATOMICS(16, std::uint16_t)
ATOMICS(32, std::uint32_t)
ATOMICS(64, std::uint64_t)
// Clang's, which GCC does not call.
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes);
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  note(from, bytes, false, __builtin_return_address(0));
  note(to, bytes, true, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, std::size_t bytes);
void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
  note(from, bytes, false, __builtin_return_address(0));
  note(to, bytes, true, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes);
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  note(to, bytes, true, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
void __tsan_atomic_thread_fence(int);
void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int);
void __tsan_atomic_signal_fence(int) {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}
}
#endif

#pragma once

// Runs CUDA kernels on the CPU, to test their logic where no GPU is. A block's threads are fibers of one host
// thread that switch only at barriers and warp operations; blocks run one after the other. Arithmetic is the
// device's as far as -fmad=false -ftz=true make it IEEE's; library functions are the CPU's. What shows here:
// wrong indices, misaligned accesses, missing or diverging barriers, data races (racecheck.h), reads of
// shared memory that nobody wrote, orders of sums. What does not: limits of registers, the speed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

namespace sherd::simt {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr Dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
  constexpr std::size_t count() const { return std::size_t{x} * y * z; }
};
struct Index3 {
  unsigned x, y, z;
};

/// The order in which blocks, and threads between two barriers, run. A kernel without data races does not see
/// it.
enum class Order : std::uint8_t { ascending, descending };
/// For the kernels that the calling host thread runs from now on. Races are looked for in ascending order
/// alone.
void set_order(Order order);
/// Bytes of shared memory that a block may have, for the same kernels.
inline constexpr std::size_t hopper_shared = 227 << 10, small_card_shared = 99 << 10;
void set_shared_limit(std::size_t bytes);
std::size_t shared_limit();

/// Runs body() once per thread of the grid. Throws Error{usage} when some threads of a block wait at a
/// barrier that others never reach, when two threads race, when a block is larger than a device takes, and
/// what body() throws.
void run(Dim3 grid, Dim3 block, std::size_t shared_bytes, const std::function<void()>& body);

// The primitives below the device's functions; to be called by kernels only.
void block_barrier();
/// A barrier that tells how many threads of the block said true.
int block_vote(bool predicate);
/// Waits for the warp's lanes in `mask` and returns what each of the 32 gave; to be read before the next
/// call.
const std::uint64_t* warp_exchange(unsigned mask, std::uint64_t value);
/// A lane's part of an exchange where one word is not enough (tensor_cores.h).
struct LaneRecord {
  float left[8], right[4];
};
/// warp_exchange() of all lanes, with a record of each.
const LaneRecord* warp_exchange(const LaneRecord& mine);
/// Waits for them, and orders what they do with memory before and after it; an exchange does not.
void warp_barrier(unsigned mask);
int lane_id();
void* dynamic_shared();
/// Fills a block's shared array with NaNs when the first of its threads comes to it; `block` is the array's
/// own note of which block that was.
void begin_shared(void* elements, std::size_t bytes, std::uint64_t& block);

// ---- for a runtime that queues kernels (tests/emulated_gpu) ----

/// How a kernel is called with pointers to its arguments, as cudaLaunchKernel() has them.
struct KernelEntry {
  std::vector<std::size_t> sizes;  ///< bytes of each argument
  void (*call)(const void* entry, Dim3 grid, Dim3 block, std::size_t shared_bytes, void* const* arguments);
};
void enroll(const void* entry, const KernelEntry& kernel);
/// Throws Error{usage} for a kernel that was never launched on a stream.
KernelEntry enrolled(const void* entry);
/// Where memory lies, for kernels' sources that ask. Everything is the device's until somebody says better.
struct MemoryLookup {
  bool (*reachable)(const void*) = nullptr;
};
MemoryLookup& memory_lookup();

/// Copies 4 or 16 bytes, or zeros where `from` is null; they come when the same thread next calls
/// finish_copies(), and until then there is nothing of meaning.
void start_copy(void* to, const void* from, std::size_t bytes);
void finish_copies();
/// One access of an atomic operation.
void note_atomic(void* memory, std::size_t bytes);
/// Throws Error{usage} for an address that a device cannot access at once.
void check_alignment(const void* memory, std::size_t alignment);

template <class T>
T shuffle(unsigned mask, T value, int from) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  word = warp_exchange(mask, word)[from & 31];
  std::memcpy(&value, &word, sizeof value);
  return value;
}

/// A block's shared array: one place for all its threads.
template <class T, std::size_t n>
class SharedArray {
 public:
  T (&of_this_block())[n] {
    static_assert(std::is_trivially_default_constructible_v<T>, "shared memory runs no constructors");
    begin_shared(elements_, sizeof elements_, block_);
    return elements_;
  }

 private:
  alignas(16) T elements_[n];
  std::uint64_t block_;
};

}  // namespace sherd::simt

// CUDA's built-in variables, of the thread that runs.
inline thread_local constinit sherd::simt::Index3 threadIdx{}, blockIdx{};
inline thread_local constinit sherd::simt::Dim3 blockDim{}, gridDim{};

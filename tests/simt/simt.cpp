#include "simt/simt.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "simt/racecheck.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

// Saves the caller's registers on its stack and the stack pointer at *from, and goes on with the stack `to`.
extern "C" void sherd_simt_switch(void** from, void* to);
asm(R"(
.text
.type sherd_simt_switch, @function
sherd_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sherd_simt_switch, .-sherd_simt_switch
)");

namespace sherd::simt {
namespace {

constexpr std::size_t stack_bytes = 256 << 10, guard_bytes = 4096;
constexpr std::size_t most_threads = 1024;

/// A stack and where on it to go on.
class Fiber {
 public:
  /// The host thread's own.
  Fiber() {
#if defined(__SANITIZE_THREAD__)
    sanitizer_ = __tsan_get_current_fiber();
#endif
  }
  explicit Fiber(void (*entry)()) : size_(stack_bytes) {
    void* stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED)
      fail(ErrorKind::memory, "the system has no memory for an emulated thread's stack");
    mprotect(stack, guard_bytes, PROT_NONE);
    bottom_ = stack, owned_ = true;
    reset(entry);
#if defined(__SANITIZE_THREAD__)
    sanitizer_ = __tsan_create_fiber(0);
#endif
  }
  ~Fiber() {
    if (!owned_) return;
#if defined(__SANITIZE_ADDRESS__)
    // Calls that never return have left marks here, which the next owner of these addresses must not meet.
    __asan_unpoison_memory_region(bottom_, stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(sanitizer_);
#endif
    munmap(bottom_, stack_bytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Begins anew with `entry`, whatever lies on the stack: six registers of no meaning, and where to go on.
  void reset(void (*entry)()) {
    auto* top = reinterpret_cast<void**>(static_cast<std::byte*>(bottom_) + stack_bytes);
    *--top = nullptr;  // entry() returns to nowhere; the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    at_ = top - 6;
  }

  const void* stack() const {
    return bottom_;
  }

  /// Goes on with `to`; returns when somebody switches back.
  void switch_to(Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, to.bottom_, to.size_);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to.sanitizer_, 0);
#endif
    sherd_simt_switch(&at_, to.at_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  /// To be called first on a new stack, which `from` switched to.
  static void arrive([[maybe_unused]] Fiber& from) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!from.owned_ && !from.bottom_) from.bottom_ = const_cast<void*>(bottom), from.size_ = size;
#endif
  }

 private:
  void* at_ = nullptr;
  void* bottom_ = nullptr;
  std::size_t size_ = 0;
  bool owned_ = false;
#if defined(__SANITIZE_THREAD__)
  void* sanitizer_ = nullptr;
#endif
};

/// Lanes that meet. Two rows of values, as fast lanes may give the next while slow ones still read the last.
struct Warp {
  unsigned expected = 0, arrived = 0;
  bool barrier = false;  ///< they meet in __syncwarp()
  std::uint64_t values[2][32] = {};
  int row = 0;
};

struct WarpRecords {
  LaneRecord of[2][32];
};

/// The threads of one block. A fiber takes thread after thread as long as none of them has to wait; a kernel
/// without barriers so is a plain loop.
class Block {
 public:
  void run(std::uint64_t index, Dim3 size, std::size_t shared_bytes, const std::function<void()>& body);

  void barrier() {
    if (++at_barrier_ == threads_) {
      at_barrier_ = 0;
      races.pass_barrier();
      release(barrier_queue_);
    } else {
      barrier_queue_.push_back({worker_, thread_});
      wait();
    }
  }

  int vote(bool predicate) {
    const int row = vote_row_;
    votes_[row] += predicate;
    if (at_barrier_ + 1 == threads_) vote_row_ ^= 1, votes_[vote_row_] = 0;
    barrier();
    return votes_[row];
  }

  const std::uint64_t* exchange(unsigned mask, std::uint64_t value, bool is_barrier) {
    Warp& warp = warps_[thread_ / 32];
    const unsigned bit = 1u << thread_ % 32;
    require(mask & bit, "simt: thread ", thread_, " is not in the mask of its own warp operation");
    require(!warp.arrived || warp.expected == mask, "simt: lanes of one warp meet with different masks");
    require(!warp.arrived || warp.barrier == is_barrier,
            "simt: lanes of one warp meet in different operations");
    warp.expected = mask, warp.barrier = is_barrier;
    const int row = warp.row;
    warp.values[row][thread_ % 32] = value;
    warp.arrived |= bit;
    if (warp.arrived == mask) {
      warp.arrived = 0, warp.row ^= 1;
      if (is_barrier) races.pass_warp_barrier(thread_ / 32, mask);
      release(warp_queues_[thread_ / 32]);
    } else {
      warp_queues_[thread_ / 32].push_back({worker_, thread_});
      wait();
    }
    return warp.values[row];
  }

  const LaneRecord* exchange(const LaneRecord& mine) {
    const std::size_t warp = thread_ / 32;
    auto& records = records_[warp].of[warps_[warp].row];
    records[thread_ % 32] = mine;
    exchange(0xffffffffu, 0, false);
    return records;
  }

  void start_copy(void* to, const void* from, std::size_t bytes, const void* code) {
    Copy copy{to, bytes, {}};
    if (from) races.access(from, bytes, false, false, code), std::memcpy(copy.value, from, bytes);
    races.access(to, bytes, true, false, code), std::memset(to, 0xff, bytes);
    copies_[thread_].push_back(copy);
  }
  void finish_copies(const void* code) {
    for (const Copy& copy : copies_[thread_])
      races.access(copy.to, copy.bytes, true, false, code), std::memcpy(copy.to, copy.value, copy.bytes);
    copies_[thread_].clear();
  }

  int lane() const { return static_cast<int>(thread_ % 32); }
  void* shared() { return shared_.data(); }
  void begin_shared(void* elements, std::size_t bytes, std::uint64_t& block) {
    if (block == serial_) return;
    std::memset(elements, 0xff, bytes);
    races.forget(elements, bytes);
    block = serial_;
  }
  Order order = Order::ascending;
  std::size_t shared_limit = hopper_shared;
  RaceCheck races;

 private:
  /// A thread in the middle of its work, and the fiber that it is on.
  struct Waiting {
    Fiber* fiber;
    std::size_t thread;
  };
  /// One that nobody has waited for.
  struct Copy {
    void* to;
    std::size_t bytes;
    std::byte value[16];
  };
  struct alignas(16) Chunk {
    std::byte bytes[16];
  };

  static void enter();
  void work();
  void become(std::size_t thread) {
    thread_ = thread;
    const auto at = static_cast<unsigned>(thread);
    threadIdx = {at % blockDim.x, at / blockDim.x % blockDim.y, at / blockDim.x / blockDim.y};
    races.run_thread(thread, worker_->stack(), stack_bytes);
  }
  /// The fiber that runs next: of a thread that may go on, or one for the next thread; the host's where none
  /// can.
  Fiber& next() {
    if (error_) return host_;
    if (!ready_.empty()) {
      worker_ = ready_.front().fiber;
      ready_.pop_front();
      return *worker_;
    }
    if (begun_ == threads_) return host_;
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(enter));
      idle_.push_back(fibers_.back().get());
    }
    worker_ = idle_.back();
    idle_.pop_back();
    return *worker_;
  }
  void wait() {
    const Waiting self{worker_, thread_};
    self.fiber->switch_to(next());
    worker_ = self.fiber;
    become(self.thread);
  }
  void release(std::vector<Waiting>& queue) {
    ready_.insert(ready_.end(), queue.begin(), queue.end());
    queue.clear();
  }
  void begin(std::uint64_t index, Dim3 size, std::size_t shared_bytes);
  [[noreturn]] void fail_deadlock();

  Fiber host_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  Fiber* worker_ = nullptr;  // the one that runs
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr error_;
  std::size_t threads_ = 0, begun_ = 0, done_ = 0, thread_ = 0, at_barrier_ = 0;
  bool descending_ = false;
  int votes_[2] = {0, 0}, vote_row_ = 0;
  std::vector<Waiting> barrier_queue_;
  std::vector<std::vector<Waiting>> warp_queues_;
  std::vector<Warp> warps_;
  std::vector<WarpRecords> records_;  // of each warp; not cleared, as all lanes give one
  std::deque<Waiting> ready_;
  std::vector<std::vector<Copy>> copies_;  // of each thread
  std::vector<Chunk> shared_;
  std::uint64_t serial_ = 0;
};

Block& this_block() {
  static thread_local Block block;
  return block;
}

void Block::enter() {
  Block& block = this_block();
  Fiber::arrive(block.host_);
  for (;;) {
    block.work();
    block.idle_.push_back(block.worker_);
    block.worker_->switch_to(block.host_);
  }
}

void Block::work() {
  while (begun_ < threads_ && !error_) {
    const std::size_t next = begun_++;
    become(descending_ ? threads_ - 1 - next : next);
    try {
      (*body_)();
    } catch (...) {
      error_ = std::current_exception();
    }
    ++done_;
  }
}

void Block::begin(std::uint64_t index, Dim3 size, std::size_t shared_bytes) {
  threads_ = size.count(), begun_ = done_ = at_barrier_ = 0;
  votes_[0] = votes_[1] = vote_row_ = 0;
  barrier_queue_.clear(), ready_.clear(), copies_.assign(threads_, {});
  warp_queues_.resize((threads_ + 31) / 32), warps_.assign((threads_ + 31) / 32, {});
  records_.resize(warps_.size());
  for (auto& queue : warp_queues_) queue.clear();
  shared_.resize((shared_bytes + sizeof(Chunk) - 1) / sizeof(Chunk));
  if (!shared_.empty()) std::memset(shared_.data(), 0xff, shared_.size() * sizeof(Chunk));
  races.begin_block(index, threads_);
  races.forget(shared_.data(), shared_.size() * sizeof(Chunk));
  ++serial_;
}

void Block::run(std::uint64_t index, Dim3 size, std::size_t shared_bytes, const std::function<void()>& body) {
  begin(index, size, shared_bytes);
  descending_ = order == Order::descending;
  body_ = &body, error_ = nullptr;
  while (done_ < threads_ && !error_) {
    Fiber& fiber = next();
    if (&fiber == &host_) fail_deadlock();
    host_.switch_to(fiber);
  }
  if (!error_) return;
  fibers_.clear(), idle_.clear();  // some stand in the middle of a thread
  std::rethrow_exception(std::exchange(error_, nullptr));
}

void Block::fail_deadlock() {
  std::size_t in_warps = 0;
  for (const auto& queue : warp_queues_) in_warps += queue.size();
  const std::size_t at_barrier = barrier_queue_.size();
  fibers_.clear(), idle_.clear();
  fail(ErrorKind::usage, "simt: a kernel's threads wait for ones that never come: in block (", blockIdx.x,
       ", ", blockIdx.y, ", ", blockIdx.z, ") of ", threads_, " threads ", done_, " are done, ", at_barrier,
       " wait at a barrier of the block and ", in_warps, " at one of their warp");
}

/// Subnormal numbers are flushed as by -ftz=true; the caller's mode comes back.
class Flushing {
 public:
  Flushing() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~Flushing() { _mm_setcsr(saved_); }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

 private:
  unsigned saved_;
};

}  // namespace

void set_order(Order order) {
  this_block().order = order;
}

void set_shared_limit(std::size_t bytes) {
  this_block().shared_limit = bytes;
}

std::size_t shared_limit() {
  return this_block().shared_limit;
}

void run(Dim3 grid, Dim3 block, std::size_t shared_bytes, const std::function<void()>& body) {
  require(grid.count() > 0 && block.count() > 0, "simt: a launch of no threads, which CUDA refuses");
  Block& here = this_block();
  require(block.count() <= most_threads && shared_bytes <= here.shared_limit, "simt: a block of ",
          block.count(), " threads and ", shared_bytes, " bytes is more than a device takes");
  require(grid.y <= 65535 && grid.z <= 65535 && grid.x <= 0x7fffffffu, "simt: the grid is too large");
  const Flushing flushing;
  blockDim = block, gridDim = grid;
  const std::size_t blocks = grid.count();
  // Whoever runs a kernel in both orders looks once: what runs in one order runs in the other, unless the
  // kernel's own data say otherwise, and looking takes most of the time.
  here.races.begin_launch(here.order == Order::ascending);
  try {
    for (std::size_t i = 0; i < blocks; ++i) {
      const auto at = static_cast<unsigned>(here.order == Order::descending ? blocks - 1 - i : i);
      blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
      here.run(at, block, shared_bytes, body);
    }
  } catch (...) {
    here.races.end_launch();
    throw;
  }
  if (const std::string found = here.races.end_launch(); !found.empty()) fail(ErrorKind::usage, found);
}

void block_barrier() {
  this_block().barrier();
}
int block_vote(bool predicate) {
  return this_block().vote(predicate);
}
const LaneRecord* warp_exchange(const LaneRecord& mine) {
  return this_block().exchange(mine);
}
const std::uint64_t* warp_exchange(unsigned mask, std::uint64_t value) {
  return this_block().exchange(mask, value, false);
}
void warp_barrier(unsigned mask) {
  this_block().exchange(mask, 0, true);
}
namespace {
struct Entries {
  std::mutex mutex;
  std::map<const void*, KernelEntry> all;  // guarded by mutex
};
Entries& entries() {
  static auto& held = *new Entries;
  return held;
}
}  // namespace

void enroll(const void* entry, const KernelEntry& kernel) {
  std::lock_guard lock(entries().mutex);
  entries().all.emplace(entry, kernel);
}

KernelEntry enrolled(const void* entry) {
  std::lock_guard lock(entries().mutex);
  const auto at = entries().all.find(entry);
  require(at != entries().all.end(), "no kernel of the emulator's begins there");
  return at->second;
}

MemoryLookup& memory_lookup() {
  static MemoryLookup lookup;
  return lookup;
}

int lane_id() {
  return this_block().lane();
}
void* dynamic_shared() {
  return this_block().shared();
}
void begin_shared(void* elements, std::size_t bytes, std::uint64_t& block) {
  this_block().begin_shared(elements, bytes, block);
}
void start_copy(void* to, const void* from, std::size_t bytes) {
  this_block().start_copy(to, from, bytes, __builtin_return_address(0));
}
void finish_copies() {
  this_block().finish_copies(__builtin_return_address(0));
}
void note_atomic(void* memory, std::size_t bytes) {
  this_block().races.access(memory, bytes, true, true, __builtin_return_address(0));
}
void check_alignment(const void* memory, std::size_t alignment) {
  if ((reinterpret_cast<std::uintptr_t>(memory) & (alignment - 1)) == 0) [[likely]]  // of a power of two
    return;
  fail(ErrorKind::usage, "simt: an access of ", alignment, " bytes at once to ", memory,
       ", which is not aligned to that");
}

}  // namespace sherd::simt

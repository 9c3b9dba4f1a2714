#include "base/arena.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "base/error.h"
#include "base/threads.h"

#if !defined(SHERD_STD_THREAD_ARENA)
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>
#else
#include <condition_variable>
#include <exception>
#include <mutex>
#include <vector>
#endif

namespace sherd {

void set_flush_denormals() {
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040u);  // FTZ (bit 15), DAZ (bit 6)
#endif
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::vector<int> available_core_ids() {
  std::vector<int> ids;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &set)) ids.push_back(core);
  return ids;
}

namespace {
/// Keeps the calling thread on some cores while it lives; on all that it had, without any.
class Binding {
 public:
  explicit Binding(const std::vector<int>& cores) : bound_(!cores.empty()) {
    if (!bound_) return;
    sched_getaffinity(0, sizeof before_, &before_);
    require(bind(cores), "this process may not run on core ", cores.front(), " or one of its neighbours");
  }
  ~Binding() {
    if (bound_) sched_setaffinity(0, sizeof before_, &before_);
  }
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  static bool bind(const std::vector<int>& cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores)
      if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
    return sched_setaffinity(0, sizeof set, &set) == 0;
  }

 private:
  bool bound_;
  cpu_set_t before_{};
};

/// True while the thread runs a chunk, so that nested loops stay serial.
thread_local bool inside_chunk = false;

struct ChunkScope {
  ChunkScope() { inside_chunk = true; }
  ~ChunkScope() { inside_chunk = false; }
};

void run_chunks(std::int64_t begin, std::int64_t end, std::int64_t count, std::int64_t grain,
                const std::function<void(std::int64_t, std::int64_t)>& body) {
  for (std::int64_t chunk = begin; chunk < end; ++chunk)
    body(chunk * grain, std::min(count, (chunk + 1) * grain));
}
}  // namespace

#if !defined(SHERD_STD_THREAD_ARENA)

namespace {
/// Whether any arena of this process has ever bound its threads.
std::atomic<bool> binds_workers = false;

/// Prepares workers, which TBB lends to one arena after the other. A worker may come bound, from an arena
/// that went without letting it out first; so each arena says where its workers run.
class WorkerObserver : public tbb::task_scheduler_observer {
 public:
  WorkerObserver(tbb::task_arena& arena, const std::vector<int>& cores)
      : tbb::task_scheduler_observer(arena),
        all_(available_core_ids()),
        cores_(cores.empty() ? all_ : cores) {
    if (!cores.empty()) binds_workers = true;
    arena.initialize();  // observe() would, and an observer that fails there for want of memory crashes as it
                         // goes
    observe(true);
  }
  ~WorkerObserver() override { observe(false); }
  void on_scheduler_entry(bool worker) override {
    set_flush_denormals();
    worker ? begin_own_thread() : ensure_signal_stack();
    if (worker && binds_workers) Binding::bind(cores_);
  }
  void on_scheduler_exit(bool worker) override {
    if (worker && binds_workers) Binding::bind(all_);
  }

 private:
  const std::vector<int> all_, cores_;  // what the arena's maker may run on, and what its workers shall
};
}  // namespace

struct Arena::Impl {
  Impl(int count, std::vector<int> on)
      : threads(count), cores(std::move(on)), arena(count), observer(arena, cores), binding(cores) {}
  int threads;
  std::vector<int> cores;
  tbb::task_arena arena;
  WorkerObserver observer;
  Binding binding;
};

namespace {
/// TBB by itself starts no more workers than there are cores, for all arenas together, and of several limits
/// the lowest counts; so one high limit is set before the first arena and stays. Each rank then gets its own
/// threads.
void allow_a_thread_per_request() {
  static const tbb::global_control control(tbb::global_control::max_allowed_parallelism, 1024);
}
}  // namespace

void Arena::parallel_for(std::int64_t count, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(1, grain);
  const std::int64_t chunks = (count + grain - 1) / grain;
  if (inside_chunk || chunks == 1 || impl_->threads == 1) return run_chunks(0, chunks, count, grain, body);
  impl_->arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<std::int64_t>(0, chunks, 1),
        [&](const tbb::blocked_range<std::int64_t>& range) {
          ChunkScope scope;
          run_chunks(range.begin(), range.end(), count, grain, body);
        },
        tbb::simple_partitioner());
  });
}

#else

struct Arena::Impl {
  Impl(int count, const std::vector<int>& cores, bool) : threads(count), binding(cores) {}
  /// Through the other constructor, so that where a thread cannot be started, the destructor ends those that
  /// were.
  Impl(int count, const std::vector<int>& cores) : Impl(count, cores, true) {
    for (int i = 1; i < count; ++i) workers.emplace_back(own_thread([this] { work(); }));
  }
  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
  }

  struct Loop {
    const std::function<void(std::int64_t, std::int64_t)>* body;
    std::int64_t count, grain, chunks;
    std::atomic<std::int64_t> next{0};
    std::exception_ptr error;  // guarded by mutex
  };

  void drain(Loop& loop) {
    ChunkScope scope;
    for (std::int64_t chunk; (chunk = loop.next.fetch_add(1)) < loop.chunks;) {
      try {
        run_chunks(chunk, chunk + 1, loop.count, loop.grain, *loop.body);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!loop.error) loop.error = std::current_exception();
      }
    }
  }

  void work() {
    set_flush_denormals();
    std::unique_lock lock(mutex);
    for (std::uint64_t seen = 0;;) {
      wake.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      if (!current) continue;
      Loop& loop = *current;
      ++active;
      lock.unlock();
      drain(loop);
      lock.lock();
      if (--active == 0) done.notify_all();
    }
  }

  int threads;
  Binding binding;  // workers start below it
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake, done;
  Loop* current = nullptr;       // guarded by mutex
  std::uint64_t generation = 0;  // guarded by mutex
  int active = 0;                // guarded by mutex
  bool stopping = false;         // guarded by mutex
};

void Arena::parallel_for(std::int64_t count, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(1, grain);
  const std::int64_t chunks = (count + grain - 1) / grain;
  if (inside_chunk || chunks == 1 || impl_->threads == 1) return run_chunks(0, chunks, count, grain, body);
  Impl::Loop loop{&body, count, grain, chunks, {}, {}};
  {
    std::lock_guard lock(impl_->mutex);
    impl_->current = &loop;
    ++impl_->generation;
  }
  impl_->wake.notify_all();
  impl_->drain(loop);
  std::unique_lock lock(impl_->mutex);
  impl_->current = nullptr;
  impl_->done.wait(lock, [&] { return impl_->active == 0; });
  if (loop.error) std::rethrow_exception(loop.error);
}

#endif

Arena::Arena(int threads, std::vector<int> cores) {
  require(threads >= 1, "an arena needs at least 1 thread, not ", threads);
#if !defined(SHERD_STD_THREAD_ARENA)
  allow_a_thread_per_request();
#endif
  impl_ = std::make_unique<Impl>(threads, std::move(cores));
  set_flush_denormals();
  ensure_signal_stack();
}
Arena::~Arena() = default;
int Arena::threads() const {
  return impl_->threads;
}

}  // namespace sherd

#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/cache/block_cache.h"
#include "device/check_list.h"
#include "device/cuda/cuda_device.h"
#include "device/graph/graph_queue.h"

namespace sherd::testing {

/// The work of kernels whose arguments change from time to time, by number.
class LazyWork {
 public:
  static std::uint64_t keep(std::function<void()> work) {
    std::lock_guard lock(all().mutex);
    all().works[++all().last] = std::move(work);
    return all().last;
  }
  static std::function<void()> take(const device::KernelLaunch& kernel) {
    std::uint64_t number = 0;
    std::memcpy(&number, kernel.arguments[0], sizeof number);
    std::lock_guard lock(all().mutex);
    return std::move(all().works.extract(number).mapped());
  }

 private:
  struct All {
    std::mutex mutex;
    std::uint64_t last = 0;
    std::map<std::uint64_t, std::function<void()>> works;
  };
  static All& all() {
    static All held;
    return held;
  }
};

/// A queue that does nothing until somebody waits for it: the laziest order that its users' marks allow, so
/// that a missing one shows as stale or overwritten data. Safe from any thread.
class LazyQueue final : public device::StreamQueue {
 public:
  /// Guards all queues of the process, which wait for each other.
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex all;
    return all;
  }
  /// Shared with events, which outlive the queue.
  struct State {
    std::vector<std::function<void()>> work;
    std::size_t done = 0;
    void run_to(std::size_t position) {
      std::lock_guard lock(mutex());
      while (done < position) std::exchange(work[done++], nullptr)();  // which lets go of what it holds
    }
    void add(std::function<void()> more) {
      std::lock_guard lock(mutex());
      work.push_back(std::move(more));
    }
  };
  struct Event final : device::StreamEvent {
    Event(std::shared_ptr<State> s, std::size_t p) : state(std::move(s)), position(p) {}
    /// Not on the first look: one that merely asks must cope with "not yet".
    bool reached() const override {
      std::lock_guard lock(mutex());
      if (looks++ > 0) state->run_to(position);
      return state->done >= position;
    }
    std::shared_ptr<State> state;
    std::size_t position;
    mutable int looks = 0;
  };

  std::shared_ptr<const device::StreamEvent> record() override {
    std::lock_guard lock(mutex());
    return std::make_shared<Event>(state, state->work.size());
  }
  void follow(const device::StreamEvent& event) override {
    const auto& other = dynamic_cast<const Event&>(event);
    state->add([from = other.state, position = other.position] { from->run_to(position); });
  }
  void* native() override { return state.get(); }
  void call(const device::LibraryCall& call) override {
    state->add([run = call.run] { run(nullptr); });
  }
  /// The kernels of lazy queues: their one argument is the number under which LazyWork holds what they do.
  void launch(const device::KernelLaunch& kernel) override { state->add(LazyWork::take(kernel)); }

  std::shared_ptr<State> state = std::make_shared<State>();
};

/// Makes graphs for a LazyQueue of what calls were when they were captured: one that should not have been
/// taken for another shows as stale data.
class LazyGraphMaker final : public device::GraphMaker {
 public:
  explicit LazyGraphMaker(std::shared_ptr<LazyQueue::State> state) : state_(std::move(state)) {}
  std::unique_ptr<device::Graph> make(const device::KernelSequence& sequence) override {
    Capture capture;
    for (std::size_t i = 0; i < sequence.size(); ++i) sequence.run(i, capture);
    auto graph = std::make_unique<LazyGraph>();
    graph->state = state_, graph->works = std::move(capture.works);
    return graph;
  }

 private:
  using Works = std::vector<std::function<void(void*)>>;
  struct Capture final : device::StreamQueue {
    std::shared_ptr<const device::StreamEvent> record() override {
      fail(ErrorKind::usage, "a mark was captured");
    }
    void follow(const device::StreamEvent&) override { fail(ErrorKind::usage, "a wait was captured"); }
    void* native() override { return nullptr; }
    void call(const device::LibraryCall& call) override { works.push_back(call.run); }
    void launch(const device::KernelLaunch& kernel) override {
      works.push_back([work = LazyWork::take(kernel)](void*) { work(); });
    }
    Works works;
  };
  struct LazyGraph final : device::Graph {
    void set(std::size_t work, const device::KernelSequence& sequence) override {
      Capture capture;
      sequence.run(work, capture);
      works[work] = std::move(capture.works.at(0));
    }
    void launch() override {
      state->add([all = works] {
        for (const auto& work : all) work(nullptr);
      });
    }
    std::shared_ptr<LazyQueue::State> state;
    Works works;
  };
  std::shared_ptr<LazyQueue::State> state_;
};

/// A CUDA device as far as memory and the order of copies go, out of plain memory and lazy queues; it runs no
/// kernels, and says so by having no multiprocessors. Memory of the device tier is filled with ones as it is
/// allocated.
class LazyCudaDevice final : public device::CudaDevice {
 public:
  /// `host_bytes`: of page-locked memory that the system has. With `graphs` the compute stream runs what
  /// comes again as graphs.
  explicit LazyCudaDevice(std::size_t host_bytes = std::numeric_limits<std::size_t>::max(),
                          bool graphs = false)
      : arena_(1), ledger_(std::make_shared<device::Ledger>()) {
    if (graphs) {
      auto inner = std::make_unique<LazyQueue>();
      auto maker = std::make_unique<LazyGraphMaker>(inner->state);
      auto queue = std::make_unique<device::GraphQueue>(std::move(inner), std::move(maker));
      graphs_ = queue.get();
      compute_ = device::Stream(std::move(queue));
    } else {
      compute_ = LazyCudaDevice::make_stream(false);
    }
    device_blocks_ = std::make_shared<device::BlockCache>(
        std::make_unique<Memory>(owned_, true, std::numeric_limits<std::size_t>::max()),
        device::Reuse::lowest);
    host_blocks_ = std::make_shared<device::BlockCache>(
        std::make_unique<Memory>(owned_, false, host_bytes),
        [compute = compute_]() mutable { return compute.record(); }, 60);
  }
  ~LazyCudaDevice() override { finish(compute_); }

  const device::CudaGpu& gpu() const override { return gpu_; }
  device::Stream& compute_stream() override { return compute_; }
  device::Stream make_stream(bool) override { return device::Stream(std::make_unique<LazyQueue>()); }
  device::DeviceMemory memory() override { return {1 << 30, 1 << 30}; }
  void make_current() override {}
  Deadline deadline() const override { return Deadline::after_seconds(60); }
  Arena& arena() override { return arena_; }
  device::Ledger& ledger() override { return *ledger_; }

  device::Storage allocate(std::size_t bytes, device::Category category, device::Tier tier) override {
    ledger_->charge(tier, category, bytes);
    const auto& cache = tier == device::Tier::device ? device_blocks_ : host_blocks_;
    std::byte* data = cache->take(bytes);
    if (!data) {
      ledger_->credit(tier, category, bytes);
      fail(ErrorKind::memory, "the lazy device has no ", bytes, " bytes left");
    }
    return device::Storage({data, bytes},
                           [ledger = ledger_, cache, category, tier](device::MemoryBlock block) {
                             cache->give(block.data, block.bytes);
                             ledger->credit(tier, category, block.bytes);
                           });
  }

  void copy(void* to, const void* from, std::size_t bytes) override { copy_on(compute_, to, from, bytes); }
  void copy_on(device::Stream& stream, void* to, const void* from, std::size_t bytes) override {
    submit(stream, device::bytes_of('c', to, from, bytes), [=] { std::memcpy(to, from, bytes); });
    if (!owns(to) || !owns(from)) finish(stream);
  }
  void zero(void* data, std::size_t bytes) override {
    submit(compute_, device::bytes_of('z', data, bytes), [=] { std::memset(data, 0, bytes); });
  }
  void end_sequence() override { compute_.queue().end_sequence(); }
  device::GraphCounts graph_counts() const override {
    return graphs_ ? graphs_->counts() : device::GraphCounts{};
  }
  bool in_gpu_memory(const void* data) const override {
    std::lock_guard lock(owned_->mutex);
    const Block* block = find(data);
    return block && block->gpu;
  }
  std::shared_ptr<void> pin(void* data, std::size_t bytes) override {
    std::lock_guard lock(owned_->mutex);
    owned_->blocks[static_cast<std::byte*>(data)] = {bytes, false};
    return {data, [owned = owned_, compute = compute_](void* pinned) mutable {
              finish(compute);
              std::lock_guard release(owned->mutex);
              owned->blocks.erase(static_cast<std::byte*>(pinned));
            }};
  }
  void synchronize() override {
    ++synchronized_;
    finish(compute_);
    check();
  }
  std::shared_ptr<void> after_synchronize(std::function<void()> check) override {
    return checks_.add(std::move(check));
  }
  void check() override { checks_.call(); }
  /// How often somebody waited for everything.
  int synchronized() const { return synchronized_; }

  /// Queues what stands for a kernel; `key` tells its work from any other's.
  void submit(device::Stream& stream, std::span<const std::byte> key, std::function<void()> work) {
    stream.queue().call({this, key, [work = std::move(work)](void*) { work(); }});
  }
  /// The same for a kernel with an argument that changes from time to time.
  void submit_changing(device::Stream& stream, std::function<void()> work) {
    std::uint64_t number = LazyWork::keep(std::move(work));
    void* const arguments[] = {&number};
    const std::size_t sizes[] = {sizeof number};
    stream.queue().launch({this, {}, {}, 0, arguments, sizes});
  }
  /// The same for work that never comes again.
  void submit(device::Stream& stream, std::function<void()> work) { state_of(stream).add(std::move(work)); }

 private:
  struct Block {
    std::size_t size;
    bool gpu;
  };
  struct Owned {
    std::mutex mutex;
    std::map<const std::byte*, Block> blocks;  // guarded by mutex
  };
  class Memory final : public device::BlockSource {
   public:
    Memory(std::shared_ptr<Owned> owned, bool gpu, std::size_t capacity)
        : owned_(std::move(owned)), gpu_(gpu), left_(capacity) {}
    std::byte* obtain(std::size_t size) override {
      if (left_ < size) return nullptr;
      left_ -= size;
      auto* data = static_cast<std::byte*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
      std::memset(data, 0xff, size);
      std::lock_guard lock(owned_->mutex);
      owned_->blocks[data] = {size, gpu_};
      return data;
    }
    void give_back(std::byte* data, std::size_t size) noexcept override {
      left_ += size;
      {
        std::lock_guard lock(owned_->mutex);
        owned_->blocks.erase(data);
      }
      std::free(data);
    }

   private:
    std::shared_ptr<Owned> owned_;
    bool gpu_;
    std::atomic<std::size_t> left_;
  };

  static LazyQueue::State& state_of(device::Stream& stream) {
    return *static_cast<LazyQueue::State*>(stream.native());
  }
  static void finish(device::Stream& stream) {
    LazyQueue::State& state = state_of(stream);  // which hands over what was deferred
    std::lock_guard lock(LazyQueue::mutex());
    state.run_to(state.work.size());
  }
  /// With owned_ locked.
  const Block* find(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    auto next = owned_->blocks.upper_bound(at);
    if (next == owned_->blocks.begin()) return nullptr;
    const auto& [begin, block] = *std::prev(next);
    return at < begin + block.size ? &block : nullptr;
  }
  bool owns(const void* data) const {
    std::lock_guard lock(owned_->mutex);
    return find(data) != nullptr;
  }

  device::CudaGpu gpu_{0, "lazy", 9, 0, std::uint64_t{1} << 30, 0};
  Arena arena_;
  std::shared_ptr<device::Ledger> ledger_;
  std::shared_ptr<Owned> owned_ = std::make_shared<Owned>();
  device::Stream compute_;
  device::GraphQueue* graphs_ = nullptr;
  std::shared_ptr<device::BlockCache> device_blocks_, host_blocks_;
  device::CheckList checks_;
  int synchronized_ = 0;
};

}  // namespace sherd::testing

#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/cache/block_cache.h"
#include "device/cuda.h"

namespace sherd::testing {

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
  void* native() const override { return state.get(); }

  std::shared_ptr<State> state = std::make_shared<State>();
};

/// A CUDA device as far as memory and the order of copies go, out of plain memory and lazy queues; it runs no
/// kernels. Memory of the device tier is filled with ones as it is allocated.
class LazyCudaDevice final : public device::CudaDevice {
 public:
  /// `host_bytes`: of page-locked memory that the system has.
  explicit LazyCudaDevice(std::size_t host_bytes = std::numeric_limits<std::size_t>::max())
      : arena_(1), ledger_(std::make_shared<device::Ledger>()) {
    compute_ = make_stream(false);
    device_blocks_ = std::make_shared<device::BlockCache>(
        std::make_unique<Memory>(owned_, true, std::numeric_limits<std::size_t>::max()));
    host_blocks_ = std::make_shared<device::BlockCache>(
        std::make_unique<Memory>(owned_, false, host_bytes),
        [compute = compute_]() mutable { return compute.mark(); }, 60);
  }
  ~LazyCudaDevice() override { finish(compute_); }

  const device::CudaGpu& gpu() const override { return gpu_; }
  device::Stream& compute_stream() override { return compute_; }
  device::Stream make_stream(bool) override { return device::Stream(std::make_unique<LazyQueue>()); }
  device::CudaMemory memory() override { return {1 << 30, 1 << 30}; }
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
                           [ledger = ledger_, cache, category, tier](device::Block block) {
                             cache->give(block.data, block.bytes);
                             ledger->credit(tier, category, block.bytes);
                           });
  }

  void copy(void* to, const void* from, std::size_t bytes) override { copy_on(compute_, to, from, bytes); }
  void copy_on(device::Stream& stream, void* to, const void* from, std::size_t bytes) override {
    submit(stream, [=] { std::memcpy(to, from, bytes); });
    if (!owns(to) || !owns(from)) finish(stream);
  }
  void zero(void* data, std::size_t bytes) override {
    submit(compute_, [=] { std::memset(data, 0, bytes); });
  }
  bool in_gpu_memory(const void* data) const override {
    std::lock_guard lock(owned_->mutex);
    const Block* block = find(data);
    return block && block->gpu;
  }
  std::shared_ptr<void> pin(void* data, std::size_t bytes) override {
    std::lock_guard lock(owned_->mutex);
    owned_->blocks[static_cast<std::byte*>(data)] = {bytes, false};
    return {data, [owned = owned_](void* pinned) {
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
    checks_->push_back(std::move(check));
    return {&checks_->back(),
            [checks = checks_, at = std::prev(checks_->end())](void*) { checks->erase(at); }};
  }
  void check() override {
    for (const std::function<void()>& each : *checks_) each();
  }
  /// How often somebody waited for everything.
  int synchronized() const { return synchronized_; }

  /// Queues what stands for a kernel.
  void submit(device::Stream& stream, std::function<void()> work) {
    state_of(stream).add(std::move(work));
  }

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
    std::lock_guard lock(LazyQueue::mutex());
    state_of(stream).run_to(state_of(stream).work.size());
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

  device::CudaGpu gpu_{0, "lazy", 9, 0, std::uint64_t{1} << 30, 1};
  Arena arena_;
  std::shared_ptr<device::Ledger> ledger_;
  std::shared_ptr<Owned> owned_ = std::make_shared<Owned>();
  device::Stream compute_;
  std::shared_ptr<device::BlockCache> device_blocks_, host_blocks_;
  std::shared_ptr<std::list<std::function<void()>>> checks_ =
      std::make_shared<std::list<std::function<void()>>>();
  int synchronized_ = 0;
};

}  // namespace sherd::testing

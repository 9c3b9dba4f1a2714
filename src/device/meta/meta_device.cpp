#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/device.h"
#include "device/heap/heap.h"

namespace sherd::device {
namespace {

/// Blocks up to here are real and zeroed: losses, norms and flags are read and written. Above, a mapping
/// costs less.
constexpr std::size_t small_block = 16384;
constexpr std::size_t alignment = 64;

std::byte* zeroed(std::size_t bytes) {
  const std::size_t size = std::max(alignment, (bytes + alignment - 1) / alignment * alignment);
  void* data = std::aligned_alloc(alignment, size);
  if (data) std::memset(data, 0, size);
  return static_cast<std::byte*>(data);
}

/// Ranges of addresses without memory, cut from large ones, of which the system is asked for few. Those that
/// are given back serve requests of the same size: a dry run has few sizes. Thread-safe.
class Addresses {
 public:
  Addresses() = default;
  ~Addresses() {
    for (const auto& [data, bytes] : regions_) ::munmap(data, bytes);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  /// Null where the system has no room for more.
  std::byte* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end()) {
      std::byte* data = found->second;
      free_.erase(found);
      return data;
    }
    const std::size_t room = (bytes + page - 1) / page * page;
    if (room > left_ && !map(std::max(room, region)) && !map(room)) return nullptr;
    left_ -= room;
    return std::exchange(next_, next_ + room);
  }
  void give(std::byte* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    free_.emplace(bytes, data);
  }

 private:
  static constexpr std::size_t page = 4096, region = std::size_t{64} << 30;

  /// Begins a region; what is left of the one before is lost.
  bool map(std::size_t bytes) {
    void* data =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return false;
    regions_.emplace_back(data, bytes);
    next_ = static_cast<std::byte*>(data), left_ = bytes;
    return true;
  }

  std::mutex mutex_;
  std::vector<std::pair<void*, std::size_t>> regions_;  // guarded by mutex_, as all below
  std::byte* next_ = nullptr;                           // of the newest region, what is not cut yet
  std::size_t left_ = 0;
  std::unordered_multimap<std::size_t, std::byte*> free_;  // by size
};

/// The memory of a CPU device as it would be: its heaps, without memory. Thread-safe.
class MetaHeaps {
 public:
  std::uint64_t take(std::size_t bytes, HeapOf kind) {
    std::lock_guard lock(mutex_);
    Heap& heap = heaps_[static_cast<std::size_t>(kind)];
    if (const std::uint64_t missing = heap.missing(bytes)) heap.grow(missing);
    return *heap.take(bytes);
  }
  void give(std::uint64_t offset, std::size_t bytes, HeapOf kind) {
    std::lock_guard lock(mutex_);
    heaps_[static_cast<std::size_t>(kind)].give(offset, bytes);
  }
  std::uint64_t free_bytes() const {
    std::lock_guard lock(mutex_);
    std::uint64_t sum = 0;
    for (const Heap& heap : heaps_) sum += heap.free_bytes();
    return sum;
  }

 private:
  mutable std::mutex mutex_;
  std::array<Heap, heap_count> heaps_ = {make_heap(HeapOf::small), make_heap(HeapOf::passing),
                                         make_heap(HeapOf::lasting)};  // guarded by mutex_
};

class MetaDevice final : public Device {
 public:
  MetaDevice(int threads, Tier processor_tier)
      : processor_tier_(processor_tier),
        arena_(threads),
        ledger_(std::make_shared<Ledger>()),
        heaps_(std::make_shared<MetaHeaps>()),
        addresses_(std::make_shared<Addresses>()) {}

  Kind kind() const override { return Kind::meta; }
  Tier processor_tier() const override { return processor_tier_; }

  /// Only numbers and flags have contents; to write more would take the memory that nobody is to take.
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes <= small_block) Device::copy(to, from, bytes);
  }
  void zero(void* data, std::size_t bytes) override {
    if (bytes <= small_block) Device::zero(data, bytes);
  }

  Storage allocate(std::size_t bytes, Category category, Tier tier) override {
    require(tier != Tier::nvme, "a device allocates memory of the device and host tiers, not files");
    ledger_->charge(tier, category, bytes);
    std::byte* data = bytes <= small_block ? zeroed(bytes) : addresses_->take(bytes);
    if (!data) {
      ledger_->credit(tier, category, bytes);
      fail(
          ErrorKind::memory, "the system has no room for ", bytes,
          " bytes of addresses, of which none would be used: raise this process's limit (ulimit -v) or allow "
          "overcommitment (vm.overcommit_memory)");
    }
    const std::uint64_t offset = heaps_->take(bytes, heap_of(bytes, category));
    return Storage({data, bytes}, [ledger = ledger_, heaps = heaps_, from = addresses_, offset, category,
                                   tier](MemoryBlock block) {
      if (block.bytes <= small_block)
        std::free(block.data);
      else
        from->give(block.data, block.bytes);
      heaps->give(offset, block.bytes, heap_of(block.bytes, category));
      ledger->credit(tier, category, block.bytes);
    });
  }

  Arena& arena() override { return arena_; }
  Ledger& ledger() override { return *ledger_; }
  std::uint64_t unused_bytes() const override {
    return has_own_memory() ? 0 : heaps_->free_bytes();  // a GPU's and page-locked memory have no heaps
  }

 private:
  const Tier processor_tier_;
  Arena arena_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<MetaHeaps> heaps_;
  std::shared_ptr<Addresses> addresses_;
};

}  // namespace

std::shared_ptr<Device> make_meta_device(int threads) {
  return std::make_shared<MetaDevice>(threads, Tier::device);
}

std::shared_ptr<Device> make_meta_gpu(int threads) {
  return std::make_shared<MetaDevice>(threads, Tier::host);
}

}  // namespace sherd::device

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "base/error.h"
#include "device/device.h"

namespace sherd::device {
namespace {

constexpr std::size_t alignment = 64;
constexpr std::size_t huge_page = std::size_t{2} << 20;

/// Rounds up so that freed blocks fit later requests: to 1/8 of the next power of two.
std::size_t size_class(std::size_t bytes) {
  if (bytes <= 4096) return (bytes + alignment - 1) / alignment * alignment + (bytes == 0 ? alignment : 0);
  std::size_t step = 512;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

/// Keeps freed blocks by size. Shared by the device and every block it gave out, so that memory may outlive the
/// device object.
class BlockCache {
 public:
  ~BlockCache() { trim(); }

  std::byte* take(std::size_t bytes) {
    const std::size_t size = size_class(bytes);
    {
      std::lock_guard lock(mutex_);
      const auto it = free_.find(size);
      if (it != free_.end() && !it->second.empty()) {
        std::byte* data = it->second.back();
        it->second.pop_back();
        return data;
      }
    }
    std::byte* data = from_system(size);
    if (!data) {
      trim();
      data = from_system(size);
    }
    if (!data) fail(ErrorKind::memory, "the system has no ", size, " bytes of memory left for the device arena");
    return data;
  }

  void give(std::byte* data, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    free_[size_class(bytes)].push_back(data);
  }

  void trim() {
    std::lock_guard lock(mutex_);
    for (auto& [size, blocks] : free_)
      for (std::byte* data : blocks) std::free(data);
    free_.clear();
  }

 private:
  static std::byte* from_system(std::size_t size) {
    const bool large = size >= huge_page;
    void* data = std::aligned_alloc(large ? huge_page : alignment,
                                    large ? (size + huge_page - 1) / huge_page * huge_page : size);
    if (data && large) madvise(data, size, MADV_HUGEPAGE);
    return static_cast<std::byte*>(data);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;  // guarded by mutex_
};

class CpuDevice final : public Device {
 public:
  CpuDevice(int threads, std::vector<int> cores)
      : arena_(threads, std::move(cores)), ledger_(std::make_shared<Ledger>()), cache_(std::make_shared<BlockCache>()) {}

  Kind kind() const override { return Kind::cpu; }

  Storage allocate(std::size_t bytes, Category category, Tier tier) override {
    require(tier != Tier::nvme, "a device allocates memory of the device and host tiers, not files");
    ledger_->charge(tier, category, bytes);
    std::byte* data;
    try {
      data = cache_->take(bytes);
    } catch (...) {
      ledger_->credit(tier, category, bytes);
      throw;
    }
    return Storage({data, bytes}, [ledger = ledger_, cache = cache_, category, tier](Block block) {
      cache->give(block.data, block.bytes);
      ledger->credit(tier, category, block.bytes);
    });
  }

  Arena& arena() override { return arena_; }
  Ledger& ledger() override { return *ledger_; }

 private:
  Arena arena_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<BlockCache> cache_;
};

}  // namespace

std::shared_ptr<Device> make_cpu_device(int threads, std::vector<int> cores) {
  return std::make_shared<CpuDevice>(threads, std::move(cores));
}

}  // namespace sherd::device

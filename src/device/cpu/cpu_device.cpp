#include <sys/mman.h>

#include <cstdlib>
#include <vector>

#include "base/error.h"
#include "device/cache/block_cache.h"

namespace sherd::device {
namespace {

constexpr std::size_t alignment = 64;
constexpr std::size_t huge_page = std::size_t{2} << 20;

class SystemMemory final : public BlockSource {
 public:
  std::byte* obtain(std::size_t size) override {
    const bool large = size >= huge_page;
    void* data = std::aligned_alloc(large ? huge_page : alignment,
                                    large ? (size + huge_page - 1) / huge_page * huge_page : size);
    if (data && large) madvise(data, size, MADV_HUGEPAGE);
    return static_cast<std::byte*>(data);
  }
  void give_back(std::byte* data, std::size_t) noexcept override { std::free(data); }
};

class CpuDevice final : public Device {
 public:
  CpuDevice(int threads, std::vector<int> cores)
      : arena_(threads, std::move(cores)), ledger_(std::make_shared<Ledger>()),
        cache_(std::make_shared<BlockCache>(std::make_unique<SystemMemory>())) {}

  Kind kind() const override { return Kind::cpu; }

  Storage allocate(std::size_t bytes, Category category, Tier tier) override {
    require(tier != Tier::nvme, "a device allocates memory of the device and host tiers, not files");
    ledger_->charge(tier, category, bytes);
    std::byte* data = cache_->take(bytes);
    if (!data) {
      ledger_->credit(tier, category, bytes);
      fail(ErrorKind::memory, "the system has no ", cache_->size_for(bytes),
           " bytes of memory left for the device arena");
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

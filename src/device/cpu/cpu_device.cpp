#include <vector>

#include "base/error.h"
#include "device/device.h"
#include "device/heap/heap_memory.h"

namespace sherd::device {
namespace {

class CpuDevice final : public Device {
 public:
  CpuDevice(int threads, std::vector<int> cores)
      : arena_(threads, std::move(cores)),
        ledger_(std::make_shared<Ledger>()),
        memory_(std::make_shared<HeapMemory>()) {}

  Kind kind() const override { return Kind::cpu; }

  Storage allocate(std::size_t bytes, Category category, Tier tier) override {
    require(tier != Tier::nvme, "a device allocates memory of the device and host tiers, not files");
    ledger_->charge(tier, category, bytes);
    std::byte* data = memory_->take(bytes, heap_of(bytes, category));
    if (!data) {
      ledger_->credit(tier, category, bytes);
      fail(ErrorKind::memory, "the system has no ", bytes, " bytes of memory left for the device arena");
    }
    return Storage({data, bytes}, [ledger = ledger_, memory = memory_, category, tier](MemoryBlock block) {
      memory->give(block.data, block.bytes);
      ledger->credit(tier, category, block.bytes);
    });
  }

  Arena& arena() override { return arena_; }
  Ledger& ledger() override { return *ledger_; }
  std::uint64_t unused_bytes() const override { return memory_->free_bytes(); }

 private:
  Arena arena_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<HeapMemory> memory_;
};

}  // namespace

std::shared_ptr<Device> make_cpu_device(int threads, std::vector<int> cores) {
  return std::make_shared<CpuDevice>(threads, std::move(cores));
}

}  // namespace sherd::device

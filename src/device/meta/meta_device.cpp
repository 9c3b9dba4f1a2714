#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "device/meta.h"

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

std::byte* addresses(std::size_t bytes) {
  void* data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

class MetaDevice final : public Device {
 public:
  MetaDevice(int threads, Kind stands_for)
      : stands_for_(stands_for), arena_(threads), ledger_(std::make_shared<Ledger>()) {}

  Kind kind() const override { return Kind::meta; }
  Kind stands_for() const { return stands_for_; }
  Tier processor_tier() const override { return stands_for_ == Kind::cuda ? Tier::host : Tier::device; }

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
    std::byte* data = bytes <= small_block ? zeroed(bytes) : addresses(bytes);
    if (!data) {
      ledger_->credit(tier, category, bytes);
      fail(
          ErrorKind::memory, "the system has no room for ", bytes,
          " bytes of addresses, of which none would be used: raise this process's limit (ulimit -v) or allow "
          "overcommitment (vm.overcommit_memory)");
    }
    return Storage({data, bytes}, [ledger = ledger_, category, tier](Block block) {
      if (block.bytes <= small_block)
        std::free(block.data);
      else
        ::munmap(block.data, block.bytes);
      ledger->credit(tier, category, block.bytes);
    });
  }

  Arena& arena() override { return arena_; }
  Ledger& ledger() override { return *ledger_; }

 private:
  const Kind stands_for_;
  Arena arena_;
  std::shared_ptr<Ledger> ledger_;
};

}  // namespace

std::shared_ptr<Device> make_meta_device(int threads) {
  return std::make_shared<MetaDevice>(threads, Kind::cpu);
}

std::shared_ptr<Device> make_meta_gpu(int threads) {
  return std::make_shared<MetaDevice>(threads, Kind::cuda);
}

Kind stands_for(const Device& device) {
  const auto* meta = dynamic_cast<const MetaDevice*>(&device);
  return meta ? meta->stands_for() : device.kind();
}

}  // namespace sherd::device

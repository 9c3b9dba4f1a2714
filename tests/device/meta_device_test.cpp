#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"
#include "device/device.h"

namespace sherd::device {
namespace {

/// Bytes of this process that lie in memory.
std::uint64_t resident() {
  std::ifstream in("/proc/self/statm");
  std::uint64_t size = 0, pages = 0;
  in >> size >> pages;
  return pages * 4096;
}

TEST(MetaDevice, ChargesTheLedgerAndTakesNoMemory) {
  const auto device = make_meta_device(3);
  EXPECT_EQ(device->kind(), Kind::meta);
  EXPECT_EQ(device->arena().threads(), 3);
  // More than machines have, and little enough for what ThreadSanitizer leaves of the address space.
  const std::uint64_t before = resident(), many = std::uint64_t{256} << 30;
  {
    const Storage large = device->allocate(many, Category::optimizer, Tier::host);
    EXPECT_EQ(device->ledger().current(Tier::host, Category::optimizer), many);
    EXPECT_EQ(large.data()[many - 1], std::byte{0});
    EXPECT_LT(resident(), before + (64u << 20));
  }
  EXPECT_EQ(device->ledger().current(Tier::host), 0u);
  EXPECT_EQ(device->ledger().peak(Tier::host), many);
}

TEST(MetaDevice, SmallBlocksAreZeroAndHoldWhatIsWritten) {
  const auto device = make_meta_device(1);
  for (int round = 0; round < 4; ++round) {
    const Storage block = device->allocate(round == 0 ? 0 : 1000, Category::activations);
    ASSERT_NE(block.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 64, 0u);
    for (std::size_t i = 0; i < block.bytes(); ++i) {
      EXPECT_EQ(block.data()[i], std::byte{0});
      block.data()[i] = std::byte{7};
    }
    for (std::size_t i = 0; i < block.bytes(); ++i) EXPECT_EQ(block.data()[i], std::byte{7});
  }
}

TEST(MetaDevice, KeepsTheLimitOfATier) {
  const auto device = make_meta_device(1);
  device->ledger().set_limit(Tier::device, 1000);
  EXPECT_THROW(device->allocate(1001, Category::parameters), Error);
  EXPECT_EQ(device->ledger().current(Tier::device), 0u);
  EXPECT_NO_THROW(device->allocate(1001, Category::parameters, Tier::host));
}

TEST(MetaDevice, StandsForACpuOrAGpu) {
  const auto cpu = make_meta_device(1), gpu = make_meta_gpu(3), real = make_cpu_device(1);
  EXPECT_FALSE(real->has_own_memory());
  EXPECT_FALSE(cpu->has_own_memory());
  EXPECT_EQ(cpu->processor_tier(), Tier::device);
  EXPECT_TRUE(gpu->has_own_memory());
  EXPECT_EQ(gpu->accelerator(), nullptr);
  EXPECT_EQ(gpu->kind(), Kind::meta);
  EXPECT_EQ(gpu->processor_tier(), Tier::host);
  EXPECT_EQ(gpu->arena().threads(), 3);
}

TEST(MetaDevice, CopiesNumbersAndNothingLarge) {
  const auto device = make_meta_gpu(1);
  const Storage from = device->allocate(8, Category::activations),
                to = device->allocate(8, Category::activations);
  from.data()[3] = std::byte{7};
  device->copy(to.data(), from.data(), 8);
  EXPECT_EQ(to.data()[3], std::byte{7});
  device->zero(to.data(), 8);
  EXPECT_EQ(to.data()[3], std::byte{0});
  const std::size_t much = std::size_t{1} << 30;
  const Storage a = device->allocate(much, Category::activations),
                b = device->allocate(much, Category::activations);
  const std::uint64_t before = resident();
  device->copy(a.data(), b.data(), much);
  device->zero(a.data(), much);
  EXPECT_LT(resident(), before + (64u << 20));
}

}  // namespace
}  // namespace sherd::device

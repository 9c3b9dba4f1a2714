#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "device/device.h"
#include "support/expect_error.h"

namespace sherd::device {
namespace {

TEST(CpuDevice, charges_what_was_asked_for_until_the_last_handle_goes) {
  const auto device = make_cpu_device(2);
  EXPECT_EQ(device->kind(), Kind::cpu);
  EXPECT_EQ(device->arena().threads(), 2);
  {
    Storage block = device->allocate(1001, Category::gradients);
    EXPECT_EQ(block.bytes(), 1001u);
    EXPECT_TRUE(block.unique());
    const Storage second = block;
    EXPECT_FALSE(block.unique());
    EXPECT_TRUE(second.same_as(block));
    block = {};
    EXPECT_FALSE(static_cast<bool>(block));
    EXPECT_EQ(device->ledger().current(Tier::device, Category::gradients), 1001u);
  }
  EXPECT_EQ(device->ledger().current(Tier::device), 0u);
  EXPECT_EQ(device->ledger().peak(Tier::device), 1001u);
}

TEST(CpuDevice, blocks_are_aligned_whole_and_apart) {
  const auto device = make_cpu_device(1);
  std::vector<Storage> blocks;
  for (const std::size_t bytes :
       {0ul, 1ul, 63ul, 64ul, 65ul, 4096ul, 4097ul, 100000ul, (2ul << 20) - 1, (2ul << 20) + 1, 5ul << 20}) {
    Storage block = device->allocate(bytes, Category::workspace);
    ASSERT_NE(block.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 64, 0u) << bytes;
    std::memset(block.data(), static_cast<int>(blocks.size() + 1), bytes);
    blocks.push_back(block);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i)
    for (std::size_t k = 0; k < blocks[i].bytes(); ++k)
      ASSERT_EQ(blocks[i].data()[k], static_cast<std::byte>(i + 1))
          << "block " << i << " was written by another";
}

TEST(CpuDevice, reuses_a_freed_block_for_whatever_fits) {
  const auto device = make_cpu_device(1);
  const std::byte* first = device->allocate(3 << 20, Category::activations).data();
  EXPECT_EQ(device->allocate(2 << 20, Category::workspace, Tier::host).data(), first);
  const Storage kept = device->allocate(3 << 20, Category::parameters);
  EXPECT_NE(kept.data(), first) << "what stays lies apart from what comes and goes";
}

TEST(CpuDevice, a_kept_block_is_never_smaller_than_the_request_it_serves) {
  const auto device = make_cpu_device(1);
  // Small blocks and large ones; each request writes to its last byte, which AddressSanitizer watches.
  for (std::size_t bytes = 4000; bytes < 80000; bytes += 67) {
    const Storage block = device->allocate(bytes, Category::workspace);
    std::memset(block.data(), 1, bytes);
  }
}

TEST(CpuDevice, a_limit_lets_it_play_a_small_device) {
  const auto device = make_cpu_device(1);
  device->ledger().set_limit(Tier::device, 1 << 20);
  const Storage most = device->allocate((1 << 20) - 10, Category::parameters);
  sherd::testing::expect_error(ErrorKind::memory, "would pass the limit of 1048576",
                               [&] { device->allocate(11, Category::activations); });
  EXPECT_EQ(device->allocate(10, Category::activations).bytes(), 10u);
}

TEST(CpuDevice, says_when_the_system_has_no_memory_and_takes_the_charge_back) {
  const auto device = make_cpu_device(1);
  sherd::testing::expect_error(ErrorKind::memory, "the system has no",
                               [&] { device->allocate(std::size_t{1} << 60, Category::parameters); });
  EXPECT_EQ(device->ledger().current(Tier::device), 0u);
}

TEST(CpuDevice, memory_may_outlive_the_device) {
  Storage block;
  {
    const auto device = make_cpu_device(2);
    block = device->allocate(1 << 16, Category::parameters);
  }
  std::memset(block.data(), 3, block.bytes());
  block = {};
}

TEST(CpuDevice, serves_many_threads) {
  const auto device = make_cpu_device(1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < 500; ++i) {
        const Storage block = device->allocate(100 + i * 13, Category::workspace);
        std::memset(block.data(), t, block.bytes());
        ASSERT_EQ(block.data()[block.bytes() - 1], static_cast<std::byte>(t));
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(device->ledger().current(Tier::device), 0u);
}

TEST(StorageWatch, does_not_keep_memory_alive) {
  const auto device = make_cpu_device(1);
  std::optional<Storage> block = device->allocate(64, Category::workspace);
  const StorageWatch watch(*block);
  EXPECT_TRUE(watch.lock().same_as(*block));
  block.reset();
  EXPECT_FALSE(static_cast<bool>(watch.lock()));
}

}  // namespace
}  // namespace sherd::device

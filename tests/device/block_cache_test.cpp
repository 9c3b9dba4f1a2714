#include "device/cache/block_cache.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "device/fake_queue.h"
#include "support/expect_error.h"
#include "support/gpu/lazy_cuda.h"

namespace sherd::device {
namespace {

namespace testing = sherd::testing;

using sherd::testing::FakeStream;

/// A system of `capacity` bytes that hands out addresses and counts.
struct FakeSystem {
  std::size_t capacity = std::size_t{1} << 30, used = 0;
  std::uintptr_t next = 4096;
  std::map<std::byte*, std::size_t> live;
  int settled = 0;
};

class FakeSource final : public BlockSource {
 public:
  explicit FakeSource(FakeSystem& system) : system_(system) {}
  std::byte* obtain(std::size_t size) override {
    if (system_.used + size > system_.capacity) return nullptr;
    auto* data = reinterpret_cast<std::byte*>(std::exchange(system_.next, system_.next + size));
    system_.live[data] = size;
    system_.used += size;
    return data;
  }
  void give_back(std::byte* data, std::size_t size) noexcept override {
    EXPECT_EQ(system_.live.at(data), size);
    system_.live.erase(data);
    system_.used -= size;
  }
  void settle() override { ++system_.settled; }

 private:
  FakeSystem& system_;
};

TEST(BlockCache, keeps_what_is_given_back_and_hands_the_last_one_out_first) {
  FakeSystem system;
  BlockCache cache(std::make_unique<FakeSource>(system));
  std::byte* a = cache.take(1000);
  std::byte* b = cache.take(1000);
  cache.give(a, 1000);
  cache.give(b, 1000);
  EXPECT_EQ(cache.kept_bytes(), 2 * size_class(1000));
  EXPECT_EQ(cache.take(1000), b);
  EXPECT_EQ(cache.take(1001), a) << "1000 and 1001 bytes share a class";
  EXPECT_EQ(cache.kept_bytes(), 0u);
  EXPECT_NE(cache.take(2000), nullptr);
  EXPECT_EQ(system.live.size(), 3u);
}

TEST(BlockCache, of_the_lowest_address_meets_the_same_addresses_every_time) {
  FakeSystem system;
  BlockCache cache(std::make_unique<FakeSource>(system), Reuse::lowest);
  std::vector<std::byte*> before;
  for (int time = 0; time < 4; ++time) {
    std::vector<std::byte*> held;
    for (int i = 0; i < 5; ++i) held.push_back(cache.take(1000));
    cache.give(held[3], 1000);
    std::byte* const again = cache.take(1000);
    EXPECT_EQ(again, held[3]);
    for (const int i : {2, 0, 4, 1, 3}) cache.give(held[static_cast<std::size_t>(i)], 1000);
    EXPECT_TRUE(time == 0 || held == before) << time;
    before = held;
  }
  EXPECT_EQ(system.live.size(), 5u);
}

TEST(BlockCache, classes_waste_at_most_an_eighth_above_a_page) {
  std::size_t before = 0;
  for (std::size_t bytes = 1; bytes < (1u << 22); bytes += bytes / 50 + 1) {
    const std::size_t size = size_class(bytes);
    EXPECT_GE(size, bytes);
    EXPECT_GE(size, before);
    EXPECT_LE(size, bytes <= 4096 ? bytes + 63 : bytes + bytes / 8);
    before = size;
  }
  EXPECT_GT(size_class(0), 0u);
}

TEST(BlockCache, gives_kept_blocks_back_before_it_reports_that_memory_is_out) {
  FakeSystem system;
  system.capacity = 100 << 10;
  BlockCache cache(std::make_unique<FakeSource>(system));
  std::byte* first = cache.take(60 << 10);
  cache.give(first, 60 << 10);
  EXPECT_NE(cache.take(50 << 10), nullptr) << "needs the room of the kept block";
  EXPECT_EQ(system.settled, 1);
  EXPECT_EQ(cache.kept_bytes(), 0u);
  EXPECT_EQ(cache.take(60 << 10), nullptr);
  EXPECT_EQ(system.live.size(), 1u);
}

TEST(BlockCache, a_fenced_block_comes_back_when_the_device_has_passed) {
  FakeSystem system;
  FakeStream compute("k");
  BlockCache cache(std::make_unique<FakeSource>(system), [&] { return compute.stream.record(); });
  std::byte* a = cache.take(256);
  std::byte* b = cache.take(256);
  cache.give(a, 256);
  cache.give(b, 256);
  EXPECT_NE(cache.take(256), a);
  EXPECT_EQ(system.live.size(), 3u);
  cache.trim();
  EXPECT_EQ(system.live.size(), 3u) << "a block that may be in use was given back";
  compute.log->events[0]->done = true;
  EXPECT_EQ(cache.take(256), a);
  EXPECT_NE(cache.take(256), b);
  compute.log->events[1]->done = true;
  EXPECT_EQ(cache.take(256), b);
}

TEST(BlockCache, waits_for_the_device_before_it_reports_that_memory_is_out) {
  testing::LazyCudaDevice device(1 << 20);
  const auto host = [&](std::size_t bytes) {
    return device.allocate(bytes, Category::workspace, Tier::host);
  };
  const Storage there = device.allocate(600 << 10, Category::workspace, Tier::device);
  for (const std::size_t size : {600 << 10, 500 << 10, 600 << 10}) {  // each needs the room of the one before
    const Storage here = host(size);
    std::memset(here.data(), 7, size);
    device.copy(there.data(), here.data(), size);
  }
  testing::expect_error(ErrorKind::memory, "no 2097152 bytes", [&] { host(2 << 20); });
}

TEST(BlockCache, says_what_it_waited_for_in_vain) {
  FakeSystem system;
  system.capacity = 1 << 10;
  FakeStream compute("k");
  BlockCache cache(
      std::make_unique<FakeSource>(system), [&] { return compute.stream.record(); }, 0.01);
  cache.give(cache.take(1 << 10), 1 << 10);
  testing::expect_error(ErrorKind::comm, "freed page-locked memory within the deadline",
                        [&] { cache.take(64); });
}

TEST(BlockCache, returns_everything_when_it_goes) {
  FakeSystem system;
  FakeStream compute("k");
  {
    BlockCache cache(std::make_unique<FakeSource>(system), [&] { return compute.stream.record(); });
    cache.give(cache.take(100), 100);
    cache.give(cache.take(5000), 5000);
  }
  EXPECT_TRUE(system.live.empty());
}

}  // namespace
}  // namespace sherd::device

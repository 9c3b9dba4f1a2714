#include "device/heap/heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "device/device.h"
#include "device/heap/heap_memory.h"

namespace sherd::device {
namespace {

constexpr std::uint64_t kib = 1024;

/// A region by its units of 64 bytes, searched from end to end: which are taken.
class Units {
 public:
  /// The smallest hole that holds `count` units, of equal ones the first; -1: none.
  std::int64_t best(std::size_t count) const {
    std::int64_t best = -1;
    std::size_t best_size = taken_.size() + 1;
    for (std::size_t at = 0; at < taken_.size();) {
      std::size_t end = at;
      while (end < taken_.size() && !taken_[end]) ++end;
      if (end - at >= count && end - at < best_size)
        best = static_cast<std::int64_t>(at), best_size = end - at;
      at = std::max(end, at + 1);
    }
    return best;
  }
  std::size_t open_end() const {
    const auto last = std::find(taken_.rbegin(), taken_.rend(), true);
    return static_cast<std::size_t>(last - taken_.rbegin());
  }
  void grow(std::size_t count) { taken_.resize(taken_.size() + count); }
  void set(std::size_t at, std::size_t count, bool taken) {
    std::fill_n(taken_.begin() + static_cast<std::ptrdiff_t>(at), count, taken);
  }
  std::size_t free() const {
    return static_cast<std::size_t>(std::count(taken_.begin(), taken_.end(), false));
  }
  std::size_t size() const { return taken_.size(); }

 private:
  std::vector<bool> taken_;
};

TEST(Heap, IsBestFitByBruteForce) {
  std::mt19937 random(7);
  Heap heap(64, 4 * kib);
  Units units;
  struct Taken {
    std::uint64_t at, bytes;
  };
  std::vector<Taken> taken;
  for (int i = 0; i < 4000; ++i) {
    if (!taken.empty() && (random() % 5 < 2 || taken.size() > 120)) {
      const std::size_t which = random() % taken.size();
      const Taken block = taken[which];
      taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(which));
      heap.give(block.at, block.bytes);
      units.set(block.at / 64, (block.bytes + 63) / 64, false);
    } else {
      const std::uint64_t bytes = 1 + random() % (3 * kib);
      const std::size_t count = (bytes + 63) / 64;
      std::int64_t expected = units.best(count);
      if (expected < 0) {
        const std::size_t lacking = count - units.open_end(), steps = (lacking + 63) / 64;
        EXPECT_FALSE(heap.take(bytes));
        ASSERT_EQ(heap.missing(bytes), steps * 4 * kib);
        heap.grow(steps * 4 * kib);
        units.grow(steps * 64);
        expected = units.best(count);
      }
      ASSERT_EQ(heap.missing(bytes), 0u);
      const auto at = heap.take(bytes);
      ASSERT_TRUE(at);
      ASSERT_EQ(*at, static_cast<std::uint64_t>(expected) * 64) << i;
      units.set(*at / 64, count, true);
      taken.push_back({*at, bytes});
    }
    ASSERT_EQ(heap.free_bytes(), units.free() * 64);
    ASSERT_EQ(heap.size(), units.size() * 64);
  }
  for (const Taken& block : taken) heap.give(block.at, block.bytes);
  EXPECT_EQ(heap.free_bytes(), heap.size());
  EXPECT_EQ(heap.missing(heap.size()), 0u) << "everything is one hole again";
}

TEST(Heap, RefusesWhatIsNotInUse) {
  Heap heap(64, 4 * kib);
  heap.grow(heap.missing(1000));
  const std::uint64_t at = *heap.take(1000);
  EXPECT_THROW(heap.give(at + 4 * kib, 64), Error);
  EXPECT_THROW(heap.give(at + 960, 128), Error);
  heap.give(at, 1000);
  EXPECT_THROW(heap.give(at, 1000), Error);
}

TEST(HeapMemory, BlocksAreAlignedApartAndTheirOwn) {
  HeapMemory memory;
  struct Taken {
    std::byte* data;
    std::size_t bytes;
    std::byte mark;
  };
  std::vector<Taken> taken;
  std::mt19937 random(3);
  for (int i = 0; i < 600; ++i) {
    if (i % 3 == 2) {
      const Taken block = taken[random() % taken.size()];
      std::erase_if(taken, [&](const Taken& other) { return other.data == block.data; });
      for (std::size_t k = 0; k < block.bytes; ++k) ASSERT_EQ(block.data[k], block.mark);
      memory.give(block.data, block.bytes);
      continue;
    }
    const std::size_t bytes = random() % (i % 2 ? 300 : 300'000);
    std::byte* data = memory.take(bytes, bytes < 65536 ? HeapOf::small : HeapOf::lasting);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % (bytes < 65536 ? 64 : 4096), 0u);
    const std::byte mark{static_cast<unsigned char>(i)};
    std::fill_n(data, bytes, mark);
    taken.push_back({data, bytes, mark});
  }
  for (const Taken& block : taken) memory.give(block.data, block.bytes);
}

TEST(HeapMemory, WhatIsFreedServesOtherSizes) {
  HeapMemory memory;
  constexpr std::size_t mib = std::size_t{1} << 20;
  std::byte *a = memory.take(4 * mib, HeapOf::passing), *b = memory.take(4 * mib, HeapOf::passing);
  memory.give(a, 4 * mib), memory.give(b, 4 * mib);
  const std::uint64_t had = memory.free_bytes();
  EXPECT_GE(had, 8 * mib);
  std::byte* both = memory.take(7 * mib, HeapOf::passing);
  const std::uint64_t taken = had - memory.free_bytes();
  EXPECT_GE(taken, 7 * mib) << "nothing more was taken from the system";
  EXPECT_LE(taken, 7 * mib + 4096) << "under AddressSanitizer a block has a gap behind it";
  memory.give(both, 7 * mib);
}

TEST(HeapMemory, GoesOnElsewhereWhereItsRoomEnds) {
  constexpr std::size_t mib = std::size_t{1} << 20;
  HeapMemory memory(4 * mib);
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 20; ++i) {
    blocks.push_back(memory.take(3 * mib, HeapOf::passing));
    ASSERT_NE(blocks.back(), nullptr);
    // Mappings of others may lie right behind.
    std::fill_n(blocks.back(), 3 * mib, std::byte{static_cast<unsigned char>(i)});
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(blocks[i][0], std::byte{static_cast<unsigned char>(i)});
    EXPECT_EQ(blocks[i][3 * mib - 1], std::byte{static_cast<unsigned char>(i)});
    memory.give(blocks[i], 3 * mib);
  }
}

TEST(HeapMemory, HasNoMoreThanTheSystem) {
  HeapMemory memory;
  EXPECT_EQ(memory.take(std::size_t{1} << 50, HeapOf::passing), nullptr);
  std::byte* data = memory.take(100, HeapOf::passing);
  EXPECT_NE(data, nullptr) << "a request that failed leaves the rest";
  memory.give(data, 100);
}

TEST(HeapMemory, ServesThreads) {
  HeapMemory memory;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed)
    threads.emplace_back([&memory, seed] {
      std::mt19937 random(seed);
      const std::byte mark{static_cast<unsigned char>(seed)};
      for (int i = 0; i < 300; ++i) {
        const std::size_t bytes = 1 + random() % 100'000;
        std::byte* data = memory.take(bytes, HeapOf::passing);
        std::fill_n(data, bytes, mark);
        EXPECT_EQ(std::count(data, data + bytes, mark), static_cast<std::ptrdiff_t>(bytes));
        memory.give(data, bytes);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

/// Ranks that are threads make their devices at the same time.
TEST(HeapMemory, BeginsBesideOthers) {
  constexpr std::size_t bytes = std::size_t{300} << 10;
  for (int round = 0; round < 30; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([i] {
        HeapMemory memory;
        std::byte* data = memory.take(bytes, HeapOf::passing);
        ASSERT_NE(data, nullptr);
        const std::byte mark{static_cast<unsigned char>(i)};
        std::fill_n(data, bytes, mark);
        EXPECT_EQ(std::count(data, data + bytes, mark), static_cast<std::ptrdiff_t>(bytes));
        memory.give(data, bytes);
      });
    for (std::thread& thread : threads) thread.join();
  }
}

/// The meta device tells beforehand what the memory of a CPU device will look like.
TEST(MetaDevice, KnowsTheHolesOfACpuDevice) {
  const auto real = make_cpu_device(1), meta = make_meta_device(1);
  std::mt19937 random(11);
  std::vector<std::pair<Storage, Storage>> held;
  for (int i = 0; i < 500; ++i) {
    if (!held.empty() && random() % 5 < 2) {
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
    } else {
      const std::size_t bytes = random() % (random() % 2 ? 1000 : 200'000);
      const Tier tier = random() % 2 ? Tier::device : Tier::host;
      const auto category = static_cast<Category>(random() % category_count);
      held.emplace_back(real->allocate(bytes, category, tier), meta->allocate(bytes, category, tier));
    }
#if !defined(__SANITIZE_ADDRESS__)  // which leaves gaps between blocks
    ASSERT_EQ(real->unused_bytes(), meta->unused_bytes()) << i;
#endif
  }
  EXPECT_GT(real->unused_bytes(), 0u);
}

}  // namespace
}  // namespace sherd::device

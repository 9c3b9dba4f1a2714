#include "comm/memory.h"

#include <gtest/gtest.h>

namespace sherd::comm {
namespace {

constexpr std::uint64_t kib = 1024, mib = 1024 * kib;

TEST(HostMemory, CountsBoardsByTheirRanks) {
  EXPECT_EQ(host_memory(1, 1), 0u);
  // Two halves of the stage of 512 KiB, and rings of 256 KiB to either rank (itself included), beside the
  // calls' descriptors.
  const std::uint64_t two = host_memory(2, 2);
  EXPECT_GT(two, mib + 512 * kib);
  EXPECT_LT(two, mib + 512 * kib + 128 * kib);
  // From four ranks on the rings share a MiB, down to 16 KiB each.
  EXPECT_NEAR(static_cast<double>(host_memory(8, 8)), static_cast<double>(2 * mib), 128.0 * kib);
  EXPECT_NEAR(static_cast<double>(host_memory(256, 256)), static_cast<double>(mib + 256 * 16 * kib),
              512.0 * kib);
}

TEST(HostMemory, CountsWhatMessagesTake) {
  EXPECT_GT(host_memory(16, 8), host_memory(8, 8) + 2 * 3 * mib) << "a longer stage, and sums under way";
  // Ranks by themselves share no stage.
  EXPECT_LT(host_memory(4, 1), 9 * mib);
  // One more rank: 4 KiB of it may lie here, and 4 KiB because it may be ahead.
  EXPECT_EQ(host_memory(65, 1) - host_memory(64, 1), 8 * kib);
}

}  // namespace
}  // namespace sherd::comm

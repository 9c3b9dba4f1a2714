#include "comm/memory.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace sherd::comm {
namespace {

constexpr std::uint64_t nccl_mib = std::uint64_t{1} << 20;

TEST(NcclMemory, GrowsWithTheRanksOfAMachineAndTheirChannels) {
  EXPECT_EQ(nccl_memory(1, 1, 32), 0u);
  EXPECT_EQ(nccl_memory(2, 2, 32), (64 + 2 * 32 * 12) * nccl_mib);
  EXPECT_EQ(nccl_memory(8, 8, 32), (64 + 8 * 32 * 12) * nccl_mib);
  EXPECT_EQ(nccl_memory(8, 8, 4), (64 + 8 * 4 * 12) * nccl_mib);
}

TEST(NcclMemory, DoesNotGrowWithMachines) {
  EXPECT_GT(nccl_memory(16, 8, 32), nccl_memory(8, 8, 32));
  EXPECT_EQ(nccl_memory(16, 8, 32), nccl_memory(1024, 8, 32));
  EXPECT_EQ(nccl_memory(2, 1, 32), (64 + 2 * 32 * 10 + 128) * nccl_mib)
      << "one rank per machine has no neighbours there";
}

TEST(NcclMemory, CountsPairsByDirection) {
  EXPECT_EQ(nccl_pairs_memory(0, 0, true, 32), 0u);
  EXPECT_EQ(nccl_pairs_memory(1, 0, true, 32), 64 * nccl_mib);
  EXPECT_EQ(nccl_pairs_memory(0, 2, true, 4), 80 * nccl_mib);
  EXPECT_EQ(nccl_pairs_memory(1, 2, false, 32), 3 * 128 * nccl_mib);
}

TEST(NcclMemory, FollowsTheEnvironmentAsNcclDoes) {
  ::unsetenv("NCCL_MAX_P2P_NCHANNELS"), ::unsetenv("NCCL_MAX_CTAS"), ::unsetenv("NCCL_MAX_NCHANNELS");
  EXPECT_EQ(nccl_channels(), 32);
  ::setenv("NCCL_MAX_CTAS", "6", 1);
  EXPECT_EQ(nccl_channels(), 8);
  ::setenv("NCCL_MAX_P2P_NCHANNELS", "2", 1);
  EXPECT_EQ(nccl_channels(), 2);
  ::setenv("NCCL_MAX_P2P_NCHANNELS", "-2", 1);
  EXPECT_EQ(nccl_channels(), 8);
  ::unsetenv("NCCL_MAX_P2P_NCHANNELS"), ::unsetenv("NCCL_MAX_CTAS");
}

}  // namespace
}  // namespace sherd::comm

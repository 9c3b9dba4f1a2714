// How parameters come from NVMe.
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

/// Bytes of a read into memory on a page that the store has to copy: a ragged end, and the whole of what is
/// small.
std::uint64_t copied(std::uint64_t bytes) {
  const std::uint64_t end = bytes % 4096;
  return bytes >= 65536 || end == 0 ? end : bytes;
}

TEST(OffloadReads, WholePagesOfParametersComeWithoutACopy) {
  for (const int ranks : {1, 2}) {
    sherd::testing::TempFolder folder;
    RunSpec spec;
    spec.stage = 3, spec.ranks = ranks, spec.hidden = 128, spec.tied = false;
    spec.offload_param = "nvme", spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 2)";
    spec.nvme_path = folder.path();
    launch_ranks(ranks, [&](DistributedPtr dist) {
      auto engine = make_engine(dist, spec);
      std::uint64_t whole = 0, rest = 0;
      for (const auto& unit : engine->sharded().units())
        for (const auto* segment : unit->stored_segments(engine->dist().world())) {
          const std::uint64_t bytes = static_cast<std::uint64_t>(segment->layout().shard()) * sizeof(bf16);
          whole += bytes, rest += copied(bytes);
        }
      const engine::IoBytes before = engine->io_bytes();
      constexpr std::uint64_t passes = 3;  // of which the first records the order, and later ones read ahead
      for (std::uint64_t pass = 0; pass < passes; ++pass)
        engine->eval_batch(synthetic_batch(engine->device(), 2, 24, 101, 0, 0, dist->rank()));
      const engine::IoBytes after = engine->io_bytes();
      EXPECT_EQ(after.read - before.read, passes * whole);
      EXPECT_EQ(after.bounced - before.bounced, passes * rest);
      EXPECT_LT(rest, whole / 4);
    });
  }
}

}  // namespace
}  // namespace sherd::test

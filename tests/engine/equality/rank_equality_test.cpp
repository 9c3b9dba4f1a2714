// One global batch gives the same losses, norms and weights, to the last bit, on any number of data-parallel
// ranks: at stages 2 and 3, with gradients accumulated in fp32 (docs/guarantees.md, "Equal to the bit").
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

constexpr int rank_micro_batches = 12;  // of a step

RunSpec on(int ranks, const std::string& dtype, int stage) {
  RunSpec spec;
  spec.ranks = ranks;
  spec.accumulation = rank_micro_batches / ranks;
  spec.dtype = dtype;
  spec.accumulate_in = "fp32";
  spec.stage = stage;
  spec.steps = 4;
  spec.layers = 2;
  return spec;
}

class RankEquality : public ::testing::TestWithParam<std::string> {};

TEST_P(RankEquality, AnyNumberOfRanksGivesTheSameBits) {
  const auto expected = train_local(on(1, GetParam(), 2));
  ASSERT_NE(expected.losses.front(), expected.losses.back());
  for (const int ranks : {1, 2, 3, 4, 6, 12})
    for (const int stage : {2, 3}) {
      RunSpec spec = on(ranks, GetParam(), stage);
      spec.bucket = ranks % 2 == 0 ? 500 : 500'000'000;
      spec.overlap = ranks % 3 == 0;
      const auto got = train_local(spec);
      EXPECT_EQ(got.losses, expected.losses) << ranks << " ranks, stage " << stage;
      EXPECT_EQ(got.norms, expected.norms) << ranks << " ranks, stage " << stage;
      EXPECT_TRUE(got.bits() == expected.bits()) << ranks << " ranks, stage " << stage;
    }
}

TEST_P(RankEquality, OnEveryTier) {
  const auto expected = train_local(on(1, GetParam(), 3));
  const TempFolder folder;
  for (const char* tier : {"cpu", "nvme"})
    for (const int ranks : {1, 3, 4}) {
      RunSpec spec = on(ranks, GetParam(), 3);
      spec.offload_param = spec.offload_optimizer = tier;
      spec.nvme_path = folder.path().string();
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << tier << " on " << ranks;
    }
}

/// A run that goes on with another number of ranks after each step, out of a checkpoint.
TEST_P(RankEquality, AlsoWhenTheNumberOfRanksChangesOnTheWay) {
  RunSpec whole = on(2, GetParam(), 3);
  whole.steps = 6;
  const auto expected = train_local(whole);
  const TempFolder folder;
  std::vector<double> losses;
  RunResult got;
  for (const auto& [ranks, stage, from, last] : {std::tuple{4, 3, 0, 2}, {3, 2, 2, 4}, {1, 3, 4, 6}}) {
    RunSpec spec = on(ranks, GetParam(), stage);
    spec.directory = folder.path().string();
    got = train_local(spec, from, last);
    losses.insert(losses.end(), got.losses.begin(), got.losses.end());
  }
  EXPECT_EQ(losses, expected.losses);
  EXPECT_TRUE(got.masters == expected.masters);
  EXPECT_TRUE(got.parameters == expected.parameters);
}

TEST_P(RankEquality, OfEvaluationLosses) {
  const auto loss_on = [&](int ranks) {
    std::vector<double> losses(static_cast<std::size_t>(ranks));
    launch_ranks(ranks, [&](const DistributedPtr& dist) {
      const auto engine = make_engine(dist, on(ranks, GetParam(), 3));
      int i = 0;
      losses[static_cast<std::size_t>(dist->rank())] = engine->eval_batches(
          [&] {
            const int global = i++ * ranks + dist->rank();
            return synthetic_batch(engine->device(), 2, 24, 101, 0, global, 0);
          },
          12 / ranks);
    });
    for (const double loss : losses) EXPECT_EQ(loss, losses[0]);
    return losses[0];
  };
  const double expected = loss_on(1);
  for (const int ranks : {2, 3, 4, 6, 12}) EXPECT_EQ(loss_on(ranks), expected) << ranks << " ranks";
}

INSTANTIATE_TEST_SUITE_P(Local, RankEquality, ::testing::Values("fp32", "bf16"),
                         [](const auto& test) { return test.param; });

/// The average over 12 is not that over 16 or 8: the remainder 8/12 is the update's.
TEST(RankEqualityOf, HalfPrecisionWithItsLossScale) {
  const auto expected = train_local(on(1, "fp16", 2));
  for (const int ranks : {3, 12}) {
    const auto got = train_local(on(ranks, "fp16", 3));
    EXPECT_EQ(got.scales, expected.scales);
    EXPECT_TRUE(got.bits() == expected.bits()) << ranks;
  }
}

/// Without fp32 sums, the bits are those of one number of ranks; the test would notice.
TEST(RankEqualityOf, SumsIn16BitsDependOnTheRanks) {
  RunSpec one = on(1, "bf16", 2), four = on(4, "bf16", 2);
  one.accumulate_in = four.accumulate_in = "bf16";
  EXPECT_FALSE(train_local(one).bits() == train_local(four).bits());
}

}  // namespace
}  // namespace sherd::test

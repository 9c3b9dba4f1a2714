// Training over tensor and context ranks: the same bits over stages, tiers, buckets and restarts within a
// layout, and the losses of one rank to rounding.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "support/equality.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

struct Ranks {
  int tensor = 1, context = 1, data = 1;
  bool sequence = true;
  std::string method = "ring";
  std::string str() const {
    return "t" + std::to_string(tensor) + "c" + std::to_string(context) + "d" + std::to_string(data) +
           (sequence ? "" : "_whole") + (context > 1 ? "_" + method : "");
  }
};

RunSpec over(const Ranks& ranks, const std::string& dtype, bool llama = false) {
  RunSpec spec;
  spec.ranks = ranks.tensor * ranks.context * ranks.data;
  spec.tensor = ranks.tensor, spec.context = ranks.context;
  spec.sequence_parallel = ranks.sequence, spec.context_method = ranks.method;
  // The same global batch for any number of data ranks.
  spec.accumulation = 4 / ranks.data;
  spec.dtype = dtype;
  spec.accumulate_in = "fp32";
  spec.llama = llama, spec.tied = !llama;
  spec.layers = 2;
  spec.steps = 6;
  return spec;
}

class ParallelEquality : public ::testing::TestWithParam<Ranks> {};

TEST_P(ParallelEquality, WithinALayoutStagesTiersAndBucketsGiveTheSameBits) {
  for (const int pair : {0, 2}) {
    RunSpec spec = over(GetParam(), "bf16", pair == 2);
    spec.stage = pair;
    const auto expected = train_local(spec);
    ASSERT_NE(expected.losses.front(), expected.losses.back());
    spec.stage = pair + 1;
    spec.bucket = 700, spec.overlap = true, spec.prefetch = 5000, spec.persistence = 40;
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "stage " << spec.stage;
    const TempFolder folder;
    spec.nvme_path = folder.path().string();
    for (const char* tier : {"cpu", "nvme"}) {
      spec.offload_optimizer = tier;
      if (pair == 2) spec.offload_param = tier;
      spec.recompute = tier[0] == 'c' ? "full" : "selective";
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "stage " << spec.stage << " on " << tier;
    }
    spec.directory = folder.path().string();
    spec.resume_at = 3;
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "resumed";
  }
}

TEST_P(ParallelEquality, FollowsOneRank) {
  static std::map<std::string, RunResult> of_one_rank;
  for (const bool llama : {false, true})
    for (const auto& [dtype, tolerance] : {std::pair{"fp32", 2e-5}, {"bf16", 2e-2}, {"fp16", 5e-3}}) {
      SCOPED_TRACE(cat(llama ? "llama " : "gpt2 ", dtype));
      RunSpec spec = over(GetParam(), dtype, llama);
      spec.stage = llama ? 3 : 1;
      const auto got = train_local(spec);
      RunResult& want = of_one_rank[cat(llama, dtype)];
      if (want.losses.empty()) want = train_local(over({}, dtype, llama));
      ASSERT_EQ(got.losses.size(), want.losses.size());
      for (std::size_t step = 0; step < want.losses.size(); ++step) {
        EXPECT_NEAR(got.losses[step], want.losses[step], tolerance) << "step " << step;
        EXPECT_NEAR(got.norms[step] / want.norms[step], 1, 5 * tolerance) << "step " << step;
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Over, ParallelEquality,
                         ::testing::Values(Ranks{2, 1, 2}, Ranks{2, 1, 1, false}, Ranks{1, 2, 2},
                                           Ranks{1, 2, 1, true, "ulysses"}, Ranks{2, 2, 1}, Ranks{2, 1, 4}),
                         [](const auto& test) { return test.param.str(); });

TEST(ParallelRuns, StayTogetherWithOneRankInBf16) {
  RunSpec one = over({}, "bf16");
  one.steps = 30;
  const auto want = train_local(one);
  for (const Ranks& ranks : {Ranks{2, 2, 1}, Ranks{2, 1, 2}, Ranks{1, 4, 1}}) {
    RunSpec spec = over(ranks, "bf16");
    spec.steps = 30, spec.stage = 3;
    const auto got = train_local(spec);
    double slope = 0, squares = 0;  // of the difference over steps, by least squares
    for (int step = 0; step < 30; ++step) {
      const auto at = static_cast<std::size_t>(step);
      const double difference = got.losses[at] - want.losses[at];
      EXPECT_LE(std::abs(difference), 2e-3 * want.losses[at]) << ranks.str() << ", step " << step;
      slope += (step - 14.5) * difference, squares += (step - 14.5) * (step - 14.5);
    }
    slope /= squares;
    EXPECT_LE(std::abs(slope), 1e-4) << ranks.str();
    std::printf("%s: slope of the difference in loss: %.2e per step\n", ranks.str().c_str(), slope);
  }
}

/// Any number of data-parallel ranks gives the same bits where each has the same tensor and context ranks.
TEST(ParallelRuns, AnyNumberOfDataRanksGivesTheSameBits) {
  for (const Ranks& ranks : {Ranks{2, 1, 1}, Ranks{1, 2, 1}}) {
    const auto want = [&] {
      RunSpec spec = over(ranks, "bf16");
      spec.stage = 3;
      return train_local(spec);
    }();
    for (const int data : {2, 4}) {
      Ranks more = ranks;
      more.data = data;
      RunSpec spec = over(more, "bf16");
      spec.stage = 2;
      EXPECT_TRUE(train_local(spec).bits() == want.bits()) << more.str();
    }
  }
}

/// A run that goes on over another layout after each step, out of a checkpoint.
TEST(ParallelRuns, GoOnOverAnotherLayout) {
  const auto want = [] {
    RunSpec spec = over({}, "fp32");
    spec.stage = 3;
    return train_local(spec);
  }();
  const TempFolder folder;
  const Ranks way[] = {{2, 1, 2}, {1, 2, 1}, {1, 1, 4}, {2, 2, 1}, {2, 1, 1, false}, {}};
  for (int step = 0; step < 6; ++step) {
    RunSpec spec = over(way[step], "fp32");
    spec.stage = step % 4;
    spec.directory = folder.path().string();
    const auto got = train_local(spec, step, step + 1);
    EXPECT_NEAR(got.losses[0], want.losses[static_cast<std::size_t>(step)], 1e-5) << way[step].str();
    EXPECT_NEAR(got.norms[0] / want.norms[static_cast<std::size_t>(step)], 1, 1e-4) << way[step].str();
  }
}

}  // namespace
}  // namespace sherd::test

// Losses and final weights do not depend, to the last bit, on how the training is spread and scheduled
// (docs/guarantees.md, "Equal to the bit"). Each case asserts from the counters that its setting took
// effect.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/equality.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

RunSpec base(const std::string& dtype, int ranks) {
  RunSpec spec;
  spec.dtype = dtype;
  spec.ranks = ranks;
  return spec;
}

struct EqualitySetting {
  std::string dtype;
  int ranks;
};
void PrintTo(const EqualitySetting& setting, std::ostream* out) {
  *out << setting.dtype << " on " << setting.ranks;
}
class Equality : public ::testing::TestWithParam<EqualitySetting> {
 protected:
  RunSpec spec() const { return base(GetParam().dtype, GetParam().ranks); }
};

TEST_P(Equality, StagesAgreeWithoutAccumulation) {
  const auto expected = train_local(spec());
  ASSERT_LT(expected.losses.back(), expected.losses.front() + 1.0);
  for (int stage = 1; stage <= 3; ++stage) {
    RunSpec s = spec();
    s.stage = stage;
    const auto got = train_local(s);
    EXPECT_EQ(got.losses, expected.losses) << "stage " << stage;
    EXPECT_TRUE(got.bits() == expected.bits()) << "stage " << stage;
    EXPECT_EQ(got.residency.gathers > 0, stage == 3) << "only stage 3 gathers parameters";
  }
}

TEST_P(Equality, StagePairsAgreeWithAccumulation) {
  RunSpec s = spec();
  s.accumulation = 3;
  const auto zero = train_local(s);
  s.stage = 1;
  EXPECT_TRUE(train_local(s).bits() == zero.bits());
  s.stage = 2;
  const auto two = train_local(s);
  EXPECT_GT(two.reducer.buckets, zero.reducer.buckets) << "stage 2 reduces after every micro-batch";
  s.stage = 3;
  EXPECT_TRUE(train_local(s).bits() == two.bits());
}

TEST_P(Equality, ResumeContinuesToTheBit) {
  for (const int stage : full_suite() ? std::vector{0, 1, 2, 3} : std::vector{0, 3}) {
    RunSpec s = spec();
    s.stage = stage;
    const auto whole = train_local(s);
    TempFolder folder;
    s.directory = folder.path().string();
    s.resume_at = 5;
    const auto resumed = train_local(s);
    EXPECT_TRUE(std::filesystem::exists(folder.path() / "middle" / "manifest.json"));
    EXPECT_TRUE(resumed.bits() == whole.bits()) << "stage " << stage;
  }
}

TEST_P(Equality, AnUlpIsSeen) {
  RunSpec s = spec();
  s.stage = 3;
  const auto clean = train_local(s);
  s.nudge_step = s.steps - 2;
  EXPECT_FALSE(train_local(s).bits() == clean.bits());
}

INSTANTIATE_TEST_SUITE_P(Local, Equality,
                         ::testing::Values(EqualitySetting{"bf16", 2}, EqualitySetting{"fp32", 2},
                                           EqualitySetting{"bf16", 4}, EqualitySetting{"fp32", 4}),
                         [](const auto& test) {
                           return test.param.dtype + "_" + std::to_string(test.param.ranks);
                         });

// ---- schedule settings at stage 3 and below ----

/// Values that a schedule setting may take; each case of the matrix picks one of each.
struct Schedule {
  int stage;
  long bucket;
  long prefetch;
  long persistence;
  long max_reuse;
  bool overlap;
  std::string recompute;
};

std::vector<Schedule> schedules() {
  if (full_suite()) {
    std::vector<Schedule> all;
    for (const int stage : {0, 1, 2, 3})
      for (const long bucket : {0L, 500L, 5000L, 500'000'000L})
        for (const bool overlap : {false, true})
          for (const char* recompute : {"none", "selective", "full"})
            for (const long prefetch : stage == 3 ? std::vector{0L, 20'000L, 50'000'000L} : std::vector{0L})
              for (const long persistence : stage == 3 ? std::vector{0L, 40L, 1'000'000L} : std::vector{0L})
                for (const long reuse : stage == 3 ? std::vector{0L, 1'000'000'000L} : std::vector{0L})
                  all.push_back({stage, bucket, prefetch, persistence, reuse, overlap, recompute});
    return all;
  }
  // Every pair of values of two settings occurs in some row.
  return {{3, 500, 20'000, 40, 0, true, "full"},
          {3, 5000, 0, 0, 1'000'000'000, true, "none"},
          {3, 0, 50'000'000, 1'000'000, 0, false, "none"},
          {3, 500'000'000, 0, 40, 0, false, "selective"},
          {3, 500, 50'000'000, 0, 1'000'000'000, false, "selective"},
          {3, 5000, 20'000, 1'000'000, 1'000'000'000, false, "full"},
          {3, 0, 20'000, 0, 0, true, "selective"},
          {3, 500'000'000, 50'000'000, 40, 1'000'000'000, true, "full"},
          {3, 500, 0, 1'000'000, 0, true, "none"},
          {2, 500, 0, 0, 0, true, "full"},
          {2, 500'000'000, 0, 0, 0, false, "none"},
          {1, 5000, 0, 0, 0, true, "selective"},
          {1, 0, 0, 0, 0, false, "full"},
          {0, 500, 0, 0, 0, true, "selective"},
          {0, 5000, 0, 0, 0, false, "full"}};
}

void expect_effect(const Schedule& schedule, const RunSpec& spec, const RunResult& got,
                   const RunResult& plain) {
  const long least = 64L * spec.ranks;
  if (schedule.bucket > 0) {
    EXPECT_LE(got.reducer.largest_bucket, std::max(least, schedule.bucket));
  }
  if (schedule.bucket > 0 && schedule.bucket < 10'000) {
    EXPECT_GT(got.reducer.buckets, plain.reducer.buckets);
  }
  EXPECT_EQ(got.reducer.overlapped > 0, schedule.overlap);
  if (schedule.stage == 3) {
    EXPECT_EQ(got.persistent > 0, schedule.persistence > 0);
    const bool gathers = schedule.persistence < 1'000'000;
    EXPECT_EQ(got.residency.gathers > 0, gathers);
    EXPECT_EQ(got.residency.prefetched > 0, gathers && schedule.prefetch > 0);
    EXPECT_EQ(got.residency.reused > 0, gathers && schedule.max_reuse > 0);
  }
  if (schedule.recompute != "none") {
    EXPECT_LT(got.activation_peak, plain.activation_peak);
  }
}

class ScheduleEquality : public ::testing::TestWithParam<EqualitySetting> {};

TEST_P(ScheduleEquality, NoSettingChangesABit) {
  const RunSpec plain_spec = base(GetParam().dtype, GetParam().ranks);
  const auto plain = train_local(plain_spec);
  for (const Schedule& schedule : schedules()) {
    RunSpec s = plain_spec;
    s.stage = schedule.stage;
    s.bucket = schedule.bucket;
    s.prefetch = schedule.prefetch;
    s.persistence = schedule.persistence;
    s.max_reuse = schedule.max_reuse;
    s.overlap = schedule.overlap;
    s.recompute = schedule.recompute;
    const auto got = train_local(s);
    EXPECT_TRUE(got.bits() == plain.bits()) << s.config();
    expect_effect(schedule, s, got, plain);
  }
}

INSTANTIATE_TEST_SUITE_P(Local, ScheduleEquality,
                         ::testing::Values(EqualitySetting{"bf16", 2}, EqualitySetting{"fp32", 4}),
                         [](const auto& test) {
                           return test.param.dtype + "_" + std::to_string(test.param.ranks);
                         });

TEST(EqualityVariants, LlamaUntiedAndHalfPrecisionToo) {
  for (const bool llama : {false, true})
    for (const char* dtype : {"bf16", "fp16"}) {
      RunSpec s = base(dtype, 2);
      s.llama = llama;
      s.tied = !llama;
      s.steps = 10;
      const auto zero = train_local(s);
      s.stage = 3;
      s.recompute = "full";
      s.prefetch = 20'000;
      EXPECT_TRUE(train_local(s).bits() == zero.bits()) << dtype << (llama ? " llama" : " gpt2");
    }
}

TEST(EqualityVariants, ResumeKeepsTheLossScaleAndItsWindow) {
  RunSpec s = base("fp16", 2);
  s.stage = 3;
  s.steps = 14;
  s.loss_scale_window = 5;
  const auto whole = train_local(s);
  ASSERT_GT(whole.scales.back(), whole.scales.front());
  TempFolder folder;
  s.directory = folder.path().string();
  s.resume_at = 8;  // inside a window
  const auto resumed = train_local(s);
  EXPECT_EQ(resumed.scales, whole.scales);
  EXPECT_TRUE(resumed.bits() == whole.bits());
}

TEST(EqualityVariants, AccumulationAgreesUnderOtherSchedules) {
  RunSpec s = base("bf16", 2);
  s.steps = 6;
  s.accumulation = 2;
  s.stage = 2;
  const auto plain = train_local(s);
  s.overlap = true;
  s.bucket = 500;
  s.recompute = "full";
  const auto bucketed = train_local(s);
  EXPECT_GT(bucketed.reducer.buckets, plain.reducer.buckets);
  EXPECT_TRUE(bucketed.bits() == plain.bits());
  s.stage = 3;
  s.prefetch = 50'000'000;
  s.max_reuse = 1'000'000'000;
  s.max_live = 20'000;  // the root and one block, of three
  const auto capped = train_local(s);
  EXPECT_GT(capped.residency.evicted, 0);
  EXPECT_LE(capped.residency.peak_live, 20'000);
  EXPECT_TRUE(capped.bits() == plain.bits());
}

TEST(EqualityVariants, ComputeThreadsDoNotMatter) {
  RunSpec s = base("bf16", 2);
  s.steps = 5;
  const auto one = train_local(s);
  s.threads = 3;
  EXPECT_TRUE(train_local(s).bits() == one.bits());
}

}  // namespace
}  // namespace sherd::test

// Every schedule, cut of the model and number of stages gives the bits of one rank that takes one micro-batch
// after the other: losses, norms, weights, over tiers, dtypes and recompute, and when a run goes on from a
// checkpoint of another schedule. Of tied embeddings, whose copies add their sums once per step, stages agree
// with each other to the bit and with one rank to rounding.
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "comm/local/local.h"
#include "support/equality_processes.h"
#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/mpirun.h"
#include "tests/comm/lazy_gpus.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

/// A schedule over so many stages, of so many virtual stages.
struct Variant {
  const char* schedule;
  int stages = 1, chunks = 1;
  long group = 0;  ///< micro-batches in a group
  std::string str() const { return cat(schedule, "_p", stages, "_v", chunks, group ? cat("_g", group) : ""); }
};
const Variant variants[] = {
    {"layered"},        {"gpipe", 2},          {"1f1b", 2},           {"1f1b", 3},
    {"1f1b", 4},        {"interleaved", 2, 2}, {"interleaved", 4, 2}, {"interleaved", 2, 2, 4},
    {"zero_bubble", 2}, {"zero_bubble", 4},    {"gpipe", 4},          {"zero_bubble", 3}};
const char* const dtypes[] = {"fp32", "bf16", "fp16"};
const char* const tiers[] = {"none", "cpu", "nvme"};
const char* const recomputes[] = {"none", "selective", "full"};
const char* const partitions[] = {"best", "uniform", "parameters"};
const char* const momentum_sgd = R"("type": "SGD", "params": {"lr": 0.05, "momentum": 0.9})";

/// Eight parts: the embedding, six blocks, and the head with the loss.
RunSpec base(int stage) {
  RunSpec spec;
  spec.ranks = 1, spec.stage = stage;
  spec.layers = 6, spec.hidden = 16, spec.tied = false;
  spec.steps = 3, spec.accumulation = 4;
  return spec;
}

RunSpec over(const Variant& variant, RunSpec spec) {
  spec.schedule = variant.schedule, spec.pipeline = variant.stages, spec.virtual_stages = variant.chunks;
  spec.micro_batch_group = variant.group;
  spec.ranks = spec.tensor * spec.context * variant.stages;
  return spec;
}

/// The result of one rank that takes one micro-batch after the other, for each setting that may change a
/// bit. Stages 0 and 1 of ZeRO reduce once per step, 2 and 3 with every micro-batch.
const RunResult& expected(const RunSpec& spec) {
  static std::map<std::string, RunResult> known;
  RunSpec plain = base(spec.stage / 2 * 2);
  plain.dtype = spec.dtype, plain.optimizer = spec.optimizer, plain.steps = spec.steps;
  plain.accumulation = spec.accumulation, plain.clipping = spec.clipping, plain.llama = spec.llama;
  plain.loss_scale_window = spec.loss_scale_window, plain.layers = spec.layers;
  plain.schedule = "accumulate";
  const auto [place, fresh] = known.try_emplace(plain.config());
  if (fresh) place->second = train_local(plain);
  return place->second;
}

void expect_same(const RunResult& got, const RunResult& want) {
  const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (std::size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_EQ(got.losses[step], want.losses[step]) << "step " << step;
    EXPECT_PRED2(same, got.norms[step], want.norms[step]) << "step " << step;
    EXPECT_EQ(got.scales[step], want.scales[step]) << "step " << step;
  }
  ASSERT_EQ(got.masters.size(), want.masters.size());
  for (const auto& [name, bytes] : want.masters) EXPECT_TRUE(got.masters.at(name) == bytes) << name;
  EXPECT_TRUE(got.bits() == want.bits());
}

void expect_runs_near(const RunResult& got, const RunResult& want, double tolerance) {
  for (std::size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], tolerance) << "step " << step;
    EXPECT_NEAR(got.norms[step] / want.norms[step], 1, 5 * tolerance) << "step " << step;
  }
}

/// The index of a way, ZeRO's stage, dtype, tier, recompute, partition, and optimizer.
using ScheduleSetting = std::tuple<int, int, int, int, int, int, int>;
const std::vector<int> setting_counts{static_cast<int>(std::size(variants)), 4, 3, 3, 3, 3, 2};

class AllSchedules : public ::testing::TestWithParam<ScheduleSetting> {};

TEST_P(AllSchedules, GiveTheBitsOfOneRank) {
  const auto& [variant, stage, dtype, tier, recompute, partition, rule] = GetParam();
  RunSpec spec = base(stage);
  spec.dtype = dtypes[dtype], spec.recompute = recomputes[recompute];
  if (rule == 1) spec.optimizer = momentum_sgd;
  const RunResult& want = expected(spec);
  ASSERT_NE(want.losses.front(), want.losses.back());
  const TempFolder folder;
  spec.nvme_path = folder.path().string();
  if (stage > 0) spec.offload_optimizer = tiers[tier];  // stage 0 shards nothing
  if (stage == 3) spec.offload_param = tiers[tier];
  spec.bucket = stage % 2 ? 900 : spec.bucket, spec.overlap = stage == 3;
  spec.prefetch = stage == 3 ? 5000 : 0;
  if (variants[variant].stages > 1) spec.partition = partitions[partition];
  expect_same(train_local(over(variants[variant], spec)), want);
}

/// All of them is a matter of a minute or two; else every two values of two settings meet.
std::vector<ScheduleSetting> schedule_settings() {
  std::vector<ScheduleSetting> out;
  const auto add = [&](const std::vector<int>& s) {
    out.emplace_back(s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
  };
  if (!full_suite()) {
    for (const auto& each : pairwise({setting_counts[0], 4, 3, 3, 3})) {
      // The last two, too cheap to be paired with all, go by turns.
      std::vector<int> all = each;
      all.push_back((each[0] + each[3]) % 3), all.push_back((each[0] + each[1] + each[2]) % 2);
      add(all);
    }
    return out;
  }
  for (int variant = 0; variant < setting_counts[0]; ++variant)
    for (int stage = 0; stage < 4; ++stage)
      for (int dtype = 0; dtype < 3; ++dtype)
        for (int tier = 0; tier < 3; ++tier)
          for (int recompute = 0; recompute < 3; ++recompute)
            add({variant, stage, dtype, tier, recompute, (variant + tier + recompute) % 3,
                 (variant + stage + dtype) % 2});
  return out;
}

std::string schedule_name(const ::testing::TestParamInfo<ScheduleSetting>& test) {
  const auto& [variant, stage, dtype, tier, recompute, partition, rule] = test.param;
  const Variant& w = variants[variant];
  return cat("s", w.schedule, "_p", w.stages, "_v", w.chunks, "_g", w.group, "_zero", stage, "_",
             dtypes[dtype], "_", tiers[tier], "_", recomputes[recompute], "_", partitions[partition],
             rule ? "_sgd" : "_adamw");
}
INSTANTIATE_TEST_SUITE_P(Over, AllSchedules, ::testing::ValuesIn(schedule_settings()), schedule_name);

/// One micro-batch, fewer than stages, and a number that stages do not divide.
TEST(ScheduleRuns, AnyNumberOfMicroBatchesGivesTheSameBits) {
  for (const int micro_batches : {1, 2, 5})
    for (const Variant& variant :
         {Variant{"layered"}, Variant{"gpipe", 3}, Variant{"1f1b", 4}, Variant{"zero_bubble", 3}}) {
      SCOPED_TRACE(cat(variant.str(), " of ", micro_batches));
      RunSpec spec = base(micro_batches == 5 ? 2 : 1);
      spec.accumulation = micro_batches;
      expect_same(train_local(over(variant, spec)), expected(spec));
    }
}

/// A scale that overflows: all stages skip the same step.
TEST(ScheduleRuns, SkipTheSameStepInFp16) {
  for (const Variant& variant :
       {Variant{"layered"}, Variant{"1f1b", 2}, Variant{"interleaved", 2, 2}, Variant{"zero_bubble", 4}}) {
    SCOPED_TRACE(variant.str());
    RunSpec spec = base(variant.stages > 1 ? 3 : 1);
    spec.dtype = "fp16", spec.steps = 20, spec.loss_scale_window = 1;  // doubles until gradients overflow
    spec.accumulation = variant.chunks > 1 ? 4 : 2;
    const RunResult& want = expected(spec);
    ASSERT_GT(want.skipped, 0);
    const RunResult got = train_local(over(variant, spec));
    expect_same(got, want);
    EXPECT_EQ(got.skipped, want.skipped);
  }
}

/// Without clipping an update may begin before the step's end.
TEST(ScheduleRuns, WithoutClippingGiveTheSameBits) {
  for (const Variant& variant : {Variant{"layered"}, Variant{"1f1b", 2}, Variant{"zero_bubble", 2}})
    for (const char* tier : {"none", "nvme"}) {
      SCOPED_TRACE(cat(variant.str(), ", ", tier));
      const TempFolder folder;
      RunSpec spec = base(3);
      spec.clipping = 0, spec.check_overflow = false;
      const RunResult& want = expected(spec);
      spec.nvme_path = folder.path().string();
      spec.offload_optimizer = spec.offload_param = tier;
      expect_same(train_local(over(variant, spec)), want);
    }
}

/// Ranks beside the stages: those of one layout over any schedule and stages agree to the bit.
TEST(ScheduleRuns, OverOtherRanksGiveTheBitsOfOneStage) {
  struct Ranks {
    int tensor, context, data;
  };
  for (const Ranks& ranks : {Ranks{2, 1, 1}, Ranks{1, 2, 1}, Ranks{1, 1, 2}, Ranks{2, 2, 2}})
    for (const int stage : {1, 3}) {
      const bool all_at_once = ranks.tensor * ranks.context * ranks.data > 2;
      SCOPED_TRACE(cat("tensor ", ranks.tensor, ", context ", ranks.context, ", data ", ranks.data,
                       ", stage ", stage));
      RunSpec spec = base(stage);
      spec.tensor = ranks.tensor, spec.context = ranks.context, spec.accumulation = 4 / ranks.data;
      spec.schedule = "accumulate", spec.ranks = ranks.tensor * ranks.context * ranks.data;
      if (all_at_once) spec.dtype = "fp32", spec.steps = 2;
      const RunResult want = train_local(spec);
      if (all_at_once) {
        RunSpec alone = spec;
        alone.accumulation = 4;
        expect_runs_near(want, expected(alone), 2e-5);
      }
      for (const Variant& variant : {Variant{"layered"}, Variant{stage == 1 ? "1f1b" : "zero_bubble", 2},
                                     Variant{"interleaved", 2, 2}}) {
        if (variant.chunks > 1 && !full_suite() && (ranks.data == 1 || all_at_once)) continue;
        RunSpec cut = over(variant, spec);
        cut.ranks = spec.ranks * variant.stages;
        expect_same(train_local(cut), want);
      }
    }
}

/// A run that goes on over other stages and another schedule after each step, out of a checkpoint.
TEST(ScheduleRuns, GoOnOverOtherStagesToTheBit) {
  for (const int stage : {0, 3}) {
    RunSpec spec = base(stage);
    spec.steps = 6;
    const RunResult& want = expected(spec);
    const TempFolder folder;
    spec.directory = folder.path().string();
    const Variant variant[] = {{"1f1b", 2}, {"accumulate"},     {"interleaved", 4, 2},
                               {"layered"}, {"zero_bubble", 3}, {"gpipe", 2}};
    RunResult last;
    for (int step = 0; step < spec.steps; ++step) {
      SCOPED_TRACE(cat("step ", step, " over ", variant[step].str()));
      last = train_local(over(variant[step], spec), step, step + 1);
      EXPECT_EQ(last.losses[0], want.losses[static_cast<std::size_t>(step)]);
      EXPECT_EQ(last.norms[0], want.norms[static_cast<std::size_t>(step)]);
    }
    EXPECT_TRUE(last.masters == want.masters);
    EXPECT_TRUE(last.parameters == want.parameters);
  }
}

/// Copies of a tied table add their sums once per step: stages agree to the bit, one rank to rounding.
TEST(ScheduleRuns, OfTiedEmbeddingsAgreeAmongStagesToTheBit) {
  for (const auto& [dtype, tolerance] : {std::pair{"fp32", 2e-5}, {"bf16", 2e-2}})
    for (const int stage : {0, 2}) {
      SCOPED_TRACE(cat(dtype, ", stage ", stage));
      RunSpec spec = base(stage);
      spec.tied = true, spec.dtype = dtype, spec.steps = 5;
      const RunResult two = train_local(over({"1f1b", 2}, spec));
      RunSpec one = spec;
      one.schedule = "accumulate";
      const RunResult want = train_local(one);
      expect_runs_near(two, want, tolerance);
      spec.stage = stage + 1;
      for (const Variant& variant :
           {Variant{"gpipe", 3}, Variant{"interleaved", 2, 2}, Variant{"zero_bubble", 4}}) {
        SCOPED_TRACE(variant.str());
        expect_same(train_local(over(variant, spec)), two);
      }
      // There a table's two uses are summed in another order.
      one.schedule = "layered";
      const RunResult layered = train_local(one);
      for (std::size_t step = 0; step < want.losses.size(); ++step)
        EXPECT_NEAR(layered.losses[step], want.losses[step], tolerance);
    }
}

/// "type:REGEX" of the configuration: blocks lie evenly, whatever the other parts weigh.
TEST(ScheduleRuns, CutWhereTheClassesOfPartsSay) {
  RunSpec spec = over({"1f1b", 3}, base(1));
  spec.partition = "type:transformerblock";
  launch_ranks(3, [&](DistributedPtr dist) {
    const std::vector<sharding::Chunk> two_each{{0, 3}, {3, 5}, {5, 8}};
    EXPECT_EQ(make_engine(dist, spec)->stages().chunks, two_each);
  });
  expect_same(train_local(spec), expected(spec));
  spec.partition = "type:conv";
  launch_ranks(3, [&](DistributedPtr dist) {
    testing::expect_error(ErrorKind::config, "no part of the model matches \"conv\"",
                          [&] { make_engine(dist, spec); });
  });
  spec.partition = "type:(block";
  testing::expect_error(ErrorKind::config, "parallel.partition_method: \"type:(block\" holds no regular",
                        [&] { config::parse_text(spec.config()); });
}

// ---- other ranks and devices ----

TEST(ScheduleProcesses, HaveTheBitsOfThreads) {
  struct Kind {
    Variant variant;
    bool mpi, shared_memory;
    const char* machines = "";
    int data = 1;
  };
  for (const Kind& kind :
       {Kind{{"1f1b", 2}, true, true}, Kind{{"zero_bubble", 2}, false, false},
        Kind{{"interleaved", 2, 2}, false, true, "01"}, Kind{{"1f1b", 2}, false, false, "", 2}}) {
    SCOPED_TRACE(kind.variant.str());
    if (kind.mpi && !comm::mpi_available()) continue;
    RunSpec spec = over(kind.variant, base(3));
    spec.hidden = 32, spec.ranks *= kind.data;
    if (kind.data > 1) spec.persistence = 100;  // parameters that are published
    const Processes how{.launcher = kind.mpi ? sherd::testing::mpirun(spec.ranks) : tcp_launcher(spec.ranks),
                        .shared_memory = kind.shared_memory,
                        .machines = kind.machines};
    const TempFolder folder;
    EXPECT_TRUE(run_processes(how, spec, folder) == train_local(spec).bits());
  }
}

/// On GPUs that do everything as late as they may: a wait that is missing between a transfer and the compute
/// stream, or memory given back too early, shows.
TEST(ScheduleStreams, HaveTheBitsOfTheProcessor) {
  const auto on_one_card = [](int ranks, const comm::CommOptions& options, const auto& body) {
    comm::run_local(ranks, comm::LocalOptions{options, comm::reduce_by_processor}, body);
  };
  const auto on_own_cards = [](int ranks, const comm::CommOptions& options, const auto& body) {
    comm::CommOptions sockets = options;
    sockets.shared_memory = false;
    comm::on_tcp_ranks(ranks, sockets, body);
  };
  for (const Variant& variant :
       {Variant{"layered"}, Variant{"1f1b", 2}, Variant{"interleaved", 2, 2}, Variant{"zero_bubble", 3}}) {
    SCOPED_TRACE(variant.str());
    RunSpec spec = base(variant.stages == 2 ? 2 : 3);
    spec.recompute = variant.stages == 3 ? "selective" : "none", spec.steps = 2;
    const RunResult& want = expected(spec);
    spec = over(variant, spec);
    spec.lazy = true;
    expect_same(train_on(on_one_card, spec), want);
    if (variant.stages == 2) expect_same(train_on(on_own_cards, spec), want);
  }
}

}  // namespace
}  // namespace sherd::test

// Rules that measure whole parameters before they update them (LAMB, LARS): the same bits wherever a
// parameter's parts lie, and beside rules that do not. What they compute is judged by LongOracle.
#include <gtest/gtest.h>

#include "engine/update/rules/parameter_norms.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;

/// Four rules. LARS has an eps that shows norms which are too large as a whole.
RunSpec mixed(int stage, int ranks) {
  RunSpec spec;
  spec.stage = stage, spec.ranks = ranks, spec.steps = 6, spec.tied = false, spec.accumulation = 2;
  spec.optimizer = R"("type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1})";
  spec.groups = R"([{"match": ["*projection.weight", "positions.weight"], "type": "LARS", "lr": 0.1,
                     "trust_coefficient": 1, "eps": 0.5},
                    {"match": "*up.*", "type": "AdamW", "lr": 0.003},
                    {"match": "*qkv.*", "type": "NVLamb", "lr": 0.01}])";
  return spec;
}

TEST(ParameterNorms, ReplicasAndStagesGiveTheSameBits) {
  const TempFolder folder;
  const RunResult two = train_local(mixed(2, 2));
  ASSERT_NE(two.losses.front(), two.losses.back());
  for (const int stages : {2, 3}) {
    RunSpec spec = mixed(2, 2 * stages);
    spec.pipeline = stages;
    EXPECT_TRUE(train_local(spec).bits() == two.bits()) << stages << " stages";
    spec.stage = 3;
    EXPECT_TRUE(train_local(spec).bits() == two.bits()) << stages << " stages, ZeRO 3";
    spec.offload_optimizer = "nvme", spec.nvme_path = folder.path().string(), spec.sub_group = 4096;
    EXPECT_TRUE(train_local(spec).bits() == two.bits()) << stages << " stages, states on NVMe";
  }
  RunSpec whole = mixed(3, 4);
  whole.accumulation = 1;
  const RunResult expected = train_local(whole);
  for (const int shard_size : {1, 2})
    for (const int stage : {0, 1, 3}) {
      RunSpec spec = whole;
      spec.shard_size = shard_size, spec.stage = stage;
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << shard_size << ", stage " << stage;
    }
}

/// A table that two stages hold is measured once.
TEST(ParameterNorms, TiedTablesOfStagesCountOnce) {
  RunSpec spec = mixed(2, 2);
  spec.tied = true, spec.pipeline = 2;
  const RunResult two = train_local(spec);
  spec.pipeline = 4, spec.ranks = 4, spec.layers = 4;
  RunSpec other = spec;
  other.pipeline = 2, other.ranks = 2;
  EXPECT_TRUE(train_local(spec).bits() == train_local(other).bits());
  RunSpec one = mixed(2, 1);
  one.tied = true;
  const RunResult alone = train_local(one);
  for (std::size_t step = 0; step < alone.losses.size(); ++step)
    EXPECT_NEAR(two.losses[step], alone.losses[step], 2e-2 * alone.losses[step]) << step;
}

TEST(ParameterNorms, SlicesOfTensorRanksAreMeasuredTogether) {
  RunSpec spec = mixed(2, 1);
  spec.dtype = "fp32", spec.dropout = 0;
  const RunResult alone = train_local(spec);
  for (const bool sequence : {false, true}) {
    RunSpec sliced = spec;
    sliced.ranks = sliced.tensor = 2, sliced.sequence_parallel = sequence;
    const RunResult two = train_local(sliced);
    for (std::size_t step = 0; step < alone.losses.size(); ++step)
      EXPECT_NEAR(two.losses[step], alone.losses[step], 1e-5 * alone.losses[step]) << step;
  }
}

TEST(ParameterNorms, LateUpdatesOnNvmeReadStatesTwice) {
  const TempFolder folder;
  RunSpec spec = mixed(3, 2);
  const RunResult expected = train_local(spec);
  spec.offload_param = spec.offload_optimizer = "nvme", spec.nvme_path = folder.path().string();
  spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 2)", spec.sub_group = 4096;
  spec.recompute = "full";
  for (const char* schedule : {"accumulate", "layered"})
    for (const char* buffers : {R"(, "buffer_count": 1)", R"(, "buffer_count": 5)"}) {
      spec.schedule = schedule, spec.offload_extra = buffers;
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << schedule << buffers;
    }
  RunSpec adam = mixed(1, 1), lamb = adam;
  adam.groups.clear(), lamb.groups.clear();
  adam.optimizer = R"("type": "AdamW", "params": {"lr": 0.01})";
  adam.offload_optimizer = lamb.offload_optimizer = "nvme";
  adam.nvme_path = lamb.nvme_path = folder.path().string();
  const auto read = [](const RunSpec& run) { return static_cast<double>(train_local(run).io.read); };
  EXPECT_NEAR(read(lamb), 2 * read(adam), 0.05 * read(lamb));
}

/// Heads and vocabularies whose ends lie within blocks of 64 elements.
TEST(ParameterNorms, TensorsThatEndWithinBlocksGiveTheSameBits) {
  const TempFolder folder;
  for (const char* type : {"Lamb", "OneBitLamb"}) {
    const bool one_bit = std::string_view(type) == "OneBitLamb";
    RunSpec base;
    base.llama = true, base.tied = false, base.hidden = 40, base.layers = 2, base.stage = 2, base.steps = 5;
    base.ranks = one_bit ? 4 : 2, base.shard_size = one_bit ? 2 : 0;
    base.optimizer = cat(R"("type": ")", type, R"(", "params": {"lr": 0.01, "weight_decay": 0.1)",
                         one_bit ? R"(, "freeze_step": 2})" : "}");
    const RunResult expected = train_local(base);
    ASSERT_NE(expected.losses.front(), expected.losses.back());
    RunSpec other = base;
    other.stage = 3;
    other.offload_optimizer = "nvme", other.nvme_path = folder.path().string(), other.sub_group = 4096;
    EXPECT_TRUE(train_local(other).bits() == expected.bits()) << type << " on NVMe";
    if (one_bit) continue;
    other.offload_optimizer = "none", base.accumulation = 2;
    base.accumulate_in = other.accumulate_in = "fp32";
    other.ranks = 4;
    EXPECT_TRUE(train_local(base).bits() == train_local(other).bits()) << "on 4 ranks";
  }
}

/// Earlier versions kept one number of all tensors of a parameter.
TEST(ParameterNorms, TensorsGoOnFromWhatWasKeptOfTheirParameter) {
  engine::ParameterNorms norms;
  autograd::Parameter parameter;
  parameter.name = "up", parameter.shape = {8, 2}, parameter.packing.tensors = {{{0, 4}}, {{4, 8}}};
  norms.restore({{"up", "0.25 1 refreshed"}});
  EXPECT_TRUE(norms.refreshed({&parameter, 0}) && norms.refreshed({&parameter, 1}));
  norms.restore({{"up/0", "0.25 1 refreshed"}, {"up/1", "0.5 1"}});
  EXPECT_TRUE(norms.refreshed({&parameter, 0}));
  EXPECT_FALSE(norms.refreshed({&parameter, 1}));
}

TEST(ParameterNorms, AnAbandonedStepLeavesNothing) {
  engine::ParameterNorms norms;
  const autograd::Parameter parameter;
  norms.of({&parameter}).weight.add(4.0);
  EXPECT_EQ(norms.of({&parameter}).weight.value(), 4);
  norms.begin();
  EXPECT_EQ(norms.of({&parameter}).weight.value(), 0);
}

TEST(ParameterNorms, TakeBackWhatTheyHaveSaved) {
  engine::ParameterNorms norms;
  autograd::Parameter parameter;
  parameter.name = "b";
  EXPECT_FALSE(norms.refreshed({&parameter}));
  const std::map<std::string, std::string> saved{{"a", "1.5 0.875"}, {"b", "0.25 1 refreshed"}};
  norms.restore(saved);
  EXPECT_EQ(norms.save(), saved);
  EXPECT_TRUE(norms.refreshed({&parameter}));
  norms.restore({{"b", "0.25 1"}});
  EXPECT_FALSE(norms.refreshed({&parameter}));
  for (const char* text : {"", "1", "1 ", "1 x", "-1 1", "1 nan", "inf 1", "1 1 ", "1 1 1", "1 1 refreshed "})
    expect_error(ErrorKind::data, cat("learned of 'b' is '", text, "', not two numbers"), [&] {
      norms.restore({{"b", text}});
    });
}

/// Nothing of it can begin before all gradients are there.
TEST(ParameterNorms, NoUpdateBeginsBesideBackward) {
  const TempFolder folder;
  RunSpec spec = mixed(2, 2);
  spec.clipping = 0, spec.check_overflow = false;
  const RunResult expected = train_local(spec);
  for (const char* tier : {"cpu", "nvme"}) {
    spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << tier;
  }
}

}  // namespace
}  // namespace sherd::test

// 8-bit AdamW: which parameters it takes, and the same bits wherever blocks lie. What it computes is judged
// by tests/optim/quantized_test.cpp.
#include <gmock/gmock.h>

#include "engine/initialize.h"
#include "engine/update/parameter_groups.h"
#include "support/equality.h"
#include "support/temp_folder.h"
#include "support/tiny_gpt.h"

namespace sherd::test {
namespace {

using config::OptimizerType;
using sherd::testing::TempFolder;
using ::testing::Contains;
using ::testing::HasSubstr;

RunSpec eight_bit(int stage, int ranks) {
  RunSpec spec;
  spec.stage = stage, spec.ranks = ranks, spec.steps = 6, spec.accumulation = 2;
  spec.optimizer = R"("type": "AdamW8bit", "params": {"lr": 0.003, "weight_decay": 0.1})";
  spec.groups = R"([{"match": "*projection*", "lr": 0.001}])";
  return spec;
}

TEST(EightBitAdamW, LeavesTablesAndWhatIsSmallToAdamW) {
  const auto types = [](bool in_group) {
    models::GptConfig options = tiny_gpt2();
    options.hidden_size = 64, options.ffn_hidden_size = 128, options.num_layers = 1, options.vocab_size = 100;
    models::Gpt model(options);
    config::Optimizer asked;
    static_cast<config::OptimizerRule&>(asked) = config::default_rule(OptimizerType::adamw8bit);
    if (in_group) {
      config::OptimizerGroup group;
      static_cast<config::OptimizerRule&>(group) = asked;
      static_cast<config::OptimizerRule&>(asked) = config::default_rule(OptimizerType::lion);
      group.match = {"*"};
      asked.groups = {group};
    }
    const config::Optimizer optimizer = engine::with_companions(asked, model);
    EXPECT_TRUE(engine::with_companions(optimizer, model) == optimizer) << "asked twice";
    std::vector<std::string> notes;
    const engine::GroupOf groups = engine::assign_groups(model, optimizer, notes);
    model.assign_names();
    std::map<std::string, OptimizerType> out;
    for (const nn::ParameterPtr& parameter : model.parameters()) {
      const auto found = groups.find(parameter.get());
      out[parameter->name] = found == groups.end()
                                 ? optimizer.type
                                 : optimizer.groups[static_cast<std::size_t>(found->second) - 1].type;
    }
    return out;
  };
  for (const bool in_group : {false, true}) {
    int codes = 0;
    for (const auto& [name, type] : types(in_group)) {
      const bool small = name.ends_with("bias") || name.find("norm") != std::string::npos;
      const bool table = name.starts_with("tokens") || name.starts_with("positions");
      EXPECT_EQ(type, small || table ? OptimizerType::adamw : OptimizerType::adamw8bit) << name;
      codes += type == OptimizerType::adamw8bit;
    }
    EXPECT_GT(codes, 0);
  }
}

TEST(EightBitAdamW, StagesAndTiersGiveTheSameBits) {
  const TempFolder folder;
  for (const char* dtype : {"bf16", "fp32", "fp16"}) {
    RunSpec base = eight_bit(2, 3);
    base.dtype = dtype, base.steps = 4;
    const RunResult expected = train_local(base);
    RunSpec adamw = base;
    adamw.optimizer = R"("type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1})";
    EXPECT_NE(train_local(adamw).losses, expected.losses);
    for (const int stage : {2, 3})
      for (const char* tier : {"none", "cpu", "nvme"}) {
        RunSpec spec = base;
        spec.stage = stage, spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
        spec.sub_group = 4096;
        EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << dtype << stage << tier;
      }
  }
}

TEST(EightBitAdamW, ReplicatedStatesGiveTheSameBits) {
  RunSpec whole = eight_bit(3, 4);
  whole.accumulation = 1;
  const RunResult expected = train_local(whole);
  for (const int shard_size : {1, 2, 4})
    for (const int stage : {0, 1, 3}) {
      RunSpec spec = whole;
      spec.shard_size = shard_size, spec.stage = stage, spec.split_masters = stage != 1;
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << shard_size << ", stage " << stage;
    }
}

/// Codes go through fp32 in checkpoints and come back the same, however shards cut blocks apart in files.
TEST(EightBitAdamW, AnyNumberOfRanksAndRestartsGiveTheSameBits) {
  const auto on = [](int ranks) {
    RunSpec spec = eight_bit(3, ranks);
    spec.accumulation = 12 / ranks, spec.accumulate_in = "fp32";
    return spec;
  };
  const RunResult expected = train_local(on(1));
  for (const int ranks : {2, 3, 6})
    EXPECT_TRUE(train_local(on(ranks)).bits() == expected.bits()) << ranks << " ranks";
  const TempFolder folder;
  RunResult got;
  for (const auto& [ranks, stage, from, last, tier] :
       {std::tuple{4, 3, 0, 2, "cpu"}, {3, 2, 2, 4, "nvme"}, {1, 3, 4, 6, "none"}}) {
    RunSpec spec = on(ranks);
    spec.stage = stage, spec.directory = folder.path().string(), spec.offload_optimizer = tier;
    spec.nvme_path = folder.path().string();
    got = train_local(spec, from, last);
  }
  EXPECT_TRUE(got.masters == expected.masters) << "out of checkpoints of other numbers of ranks";
}

/// AdamW's states in fp32 are encoded on the way in.
TEST(EightBitAdamW, GoesOnFromAdamW) {
  const TempFolder folder;
  RunSpec spec = eight_bit(2, 2);
  const std::string codes = spec.optimizer;
  spec.optimizer = R"("type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1})";
  const RunResult whole = train_local(spec);
  spec.directory = folder.path().string();
  train_local(spec, 0, 3);
  spec.optimizer = codes;
  const RunResult got = train_local(spec, 3, 6);
  EXPECT_NEAR(got.losses.back(), whole.losses.back(), 0.01);
  EXPECT_NE(got.losses.back(), whole.losses.back());
}

/// Files of AdamW cut blocks apart where other ranks' shards began.
TEST(EightBitAdamW, EncodesBlocksThatComeInParts) {
  const auto after = [](int ranks) {
    const TempFolder folder;
    RunSpec spec = eight_bit(3, ranks);
    const std::string codes = spec.optimizer;
    spec.accumulation = 12 / ranks, spec.accumulate_in = "fp32", spec.directory = folder.path().string();
    spec.optimizer = R"("type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1})";
    train_local(spec, 0, 2);
    spec.optimizer = codes, spec.ranks = 1, spec.accumulation = 12;
    return train_local(spec, 2, 4).masters;
  };
  const auto expected = after(1);
  for (const int ranks : {3, 4, 6}) EXPECT_TRUE(after(ranks) == expected) << ranks << " ranks";
}

TEST(EightBitAdamW, StagesOfAPipelineGiveTheSameBits) {
  RunSpec spec = eight_bit(2, 2);
  spec.tied = false;
  const RunResult two = train_local(spec);
  spec.ranks = 4, spec.pipeline = 2;
  EXPECT_TRUE(train_local(spec).bits() == two.bits());
}

TEST(EightBitAdamW, TensorRanksTrainAlike) {
  const RunResult one = train_local(eight_bit(2, 1));
  RunSpec spec = eight_bit(2, 2);
  spec.tensor = 2;
  EXPECT_NEAR(train_local(spec).losses.back(), one.losses.back(), 0.02);
}

/// Two bytes of moments come and go in place of four, beside four of the weights.
TEST(EightBitAdamW, MovesAByteForEachMoment) {
  const TempFolder folder;
  RunSpec adamw = eight_bit(1, 1);
  adamw.groups.clear(), adamw.offload_optimizer = "nvme", adamw.nvme_path = folder.path().string();
  adamw.moments = "bf16";
  RunSpec codes = adamw;
  adamw.optimizer = R"("type": "AdamW", "params": {"lr": 0.003})";
  const engine::IoBytes before = train_local(adamw).io, after = train_local(codes).io;
  EXPECT_LT(static_cast<double>(after.read), 0.85 * static_cast<double>(before.read));
  EXPECT_LT(static_cast<double>(after.written), 0.85 * static_cast<double>(before.written));
}

}  // namespace
}  // namespace sherd::test

// Muon: which parameters it takes, and the same bits wherever parts of a matrix lie and whichever rank works
// on it. What it computes is judged by LongOracle and tests/optim/muon_test.cpp.
#include <gmock/gmock.h>

#include "engine/initialize.h"
#include "engine/update/parameter_groups.h"
#include "engine/update/rules/whole_matrices.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"
#include "support/tiny_gpt.h"

namespace sherd::test {
namespace {

using config::OptimizerType;
using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

config::Optimizer muon_section() {
  config::Optimizer out;
  static_cast<config::OptimizerRule&>(out) = config::default_rule(OptimizerType::muon);
  return out;
}

/// Type of the rule that updates each parameter.
std::map<std::string, OptimizerType> types_of(nn::Module& model, const config::Optimizer& asked) {
  const config::Optimizer optimizer = engine::with_companions(asked, model);
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
}

std::vector<std::string> taken_by(const std::map<std::string, OptimizerType>& types, OptimizerType type) {
  std::vector<std::string> out;
  for (const auto& [name, own] : types)
    if (own == type) out.push_back(name);
  return out;
}

TEST(MuonGroups, TakeTheMatricesOfBlocks) {
  for (const bool llama : {false, true}) {
    models::GptConfig options = llama ? tiny_llama() : tiny_gpt2();
    options.num_layers = 1;
    models::Gpt model(options);
    const auto types = types_of(model, muon_section());
    EXPECT_THAT(taken_by(types, OptimizerType::muon),
                ElementsAre("blocks.0.attention.projection.weight", "blocks.0.attention.qkv.weight",
                            "blocks.0.mlp.down.weight", "blocks.0.mlp.up.weight"));
    EXPECT_EQ(taken_by(types, OptimizerType::adamw).size(), types.size() - 4);
  }
}

TEST(MuonGroups, AreFewPatternsAndTheSameWhenAskedTwice) {
  models::Gpt model(tiny_llama());
  config::Optimizer section = muon_section();
  section.as<config::MuonOptions>().adam_lr = 0.25;
  const config::Optimizer once = engine::with_companions(section, model);
  ASSERT_EQ(once.groups.size(), 1u);
  EXPECT_THAT(once.groups[0].match, ElementsAre("blocks.*.norm_1.weight", "blocks.*.norm_2.weight",
                                                "head.weight", "norm.weight", "tokens.weight"));
  EXPECT_EQ(once.groups[0].lr, 0.25);
  EXPECT_TRUE(engine::with_companions(once, model) == once);
}

TEST(MuonGroups, StandBeforeTheGroupsThatTheyAreOf) {
  models::Gpt model(tiny_gpt2());
  config::Optimizer section;  // AdamW
  config::OptimizerGroup& head = section.groups.emplace_back();
  static_cast<config::OptimizerRule&>(head) = config::default_rule(OptimizerType::lion);
  head.match = {"norm.*"};
  config::OptimizerGroup& blocks = section.groups.emplace_back();
  static_cast<config::OptimizerRule&>(blocks) = config::default_rule(OptimizerType::muon);
  blocks.match = {"blocks.1.*"}, blocks.as<config::MuonOptions>().eps = 0.5;
  const config::Optimizer got = engine::with_companions(section, model);
  ASSERT_EQ(got.groups.size(), 3u);
  EXPECT_EQ(got.groups[1].type, OptimizerType::adamw);
  EXPECT_EQ(got.groups[1].as<config::AdamOptions>().eps, 0.5);
  EXPECT_TRUE(got.groups[2] == blocks);
  const auto types = types_of(model, section);
  EXPECT_EQ(taken_by(types, OptimizerType::muon).size(), 4u);
  EXPECT_EQ(taken_by(types, OptimizerType::lion).size(), 2u);
}

/// A group that gives no type may be of what Muon leaves to AdamW, which then has the group's values.
TEST(MuonGroups, OfTablesAndVectorsGoToAdamW) {
  models::Gpt model(tiny_gpt2());
  config::Optimizer section = muon_section();
  section.lr = 0.5, section.as<config::MuonOptions>().adam_lr = 0.25, section.weight_decay = 0.1;
  const auto add = [&](const char* match) -> config::OptimizerGroup& {
    config::OptimizerGroup& group = section.groups.emplace_back();
    static_cast<config::OptimizerRule&>(group) = section;
    group.match = {match};
    return group;
  };
  add("tokens.*").lr = 0.125;
  add("*.bias").weight_decay = 0.2;
  add("positions.*").as<config::MuonOptions>().adam_lr = 0.75;
  const config::Optimizer got = engine::with_companions(section, model);
  const auto types = types_of(model, section);
  EXPECT_EQ(taken_by(types, OptimizerType::muon).size(), 8u);
  ASSERT_GE(got.groups.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(got.groups[i].type, OptimizerType::adamw);
  EXPECT_EQ(got.groups[0].lr, 0.125) << "its own";
  EXPECT_EQ(got.groups[1].lr, 0.25) << "what the section has for AdamW";
  EXPECT_EQ(got.groups[1].weight_decay, 0.2);
  EXPECT_EQ(got.groups[2].lr, 0.75);
  EXPECT_TRUE(engine::with_companions(got, model) == got);
}

/// The section may leave all matrices to groups of its type, not to others.
TEST(MuonGroups, MayHaveAllMatricesOfTheSection) {
  models::Gpt model(tiny_gpt2());
  config::Optimizer section = muon_section();
  config::OptimizerGroup& blocks = section.groups.emplace_back();
  static_cast<config::OptimizerRule&>(blocks) = section;
  blocks.match = {"blocks.*"};
  EXPECT_EQ(taken_by(types_of(model, section), OptimizerType::muon).size(), 8u);
  static_cast<config::OptimizerRule&>(section.groups[0]) = config::default_rule(OptimizerType::adamw);
  expect_error(ErrorKind::config, "optimizer is of type Muon, which takes matrices of blocks, and has none",
               [&] { engine::with_companions(section, model); });
}

TEST(MuonGroups, WithoutAMatrixAreRefused) {
  models::Gpt model(tiny_gpt2());
  config::Optimizer section;
  config::OptimizerGroup& group = section.groups.emplace_back();
  static_cast<config::OptimizerRule&>(group) = config::default_rule(OptimizerType::muon);
  group.match = {"tokens.*"};
  expect_error(ErrorKind::config,
               "optimizer.groups[0] is of type Muon, which takes matrices of blocks, and has none: "
               "'tokens.weight' is no 2-dimensional weight of a block (mark_block()); choose another type",
               [&] { engine::with_companions(section, model); });
}

TEST(MuonGroups, RefuseMatricesThatAreNotTheRows) {
  models::Gpt model(tiny_gpt2());
  for (const auto& [name, parameter] : model.named_parameters())
    if (name == "blocks.1.mlp.up.weight") parameter->packing.tensors = {{{0, 4}}, {{5, 10}}};
  expect_error(
      ErrorKind::usage,
      "parameter 'blocks.1.mlp.up.weight' packs tensors that are not the first of its 10 rows, each once",
      [&] { engine::with_companions(muon_section(), model); });
}

/// One segment of these parameters over so many ranks.
std::vector<std::pair<std::int64_t, std::int64_t>> shapes_of(const nn::ParameterPtr& parameter) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  engine::for_each_shape(*parameter, 0, parameter->numel(),
                         [&](std::int64_t, std::int64_t count, std::int64_t rows, std::int64_t) {
                           out.emplace_back(count, rows);
                         });
  return out;
}

TEST(WholeMatrices, QueriesKeysAndValuesAreApart) {
  models::Gpt model(tiny_llama());  // 2 groups of 2 query heads, a key head and a value head, of 2 rows each
  for (const auto& [name, parameter] : model.named_parameters()) {
    using Rows = std::vector<tensor::Range>;
    if (name == "blocks.0.attention.qkv.weight") {
      EXPECT_THAT(parameter->packing.tensors,
                  ElementsAre(Rows{{0, 4}, {8, 12}}, Rows{{4, 6}, {12, 14}}, Rows{{6, 8}, {14, 16}}));
      // Runs of one shape: queries are of 8 rows, keys and values beside them of 4.
      EXPECT_THAT(shapes_of(parameter),
                  ElementsAre(std::pair(24, 8), std::pair(24, 4), std::pair(24, 8), std::pair(24, 4)));
    }
    if (name == "blocks.0.mlp.up.weight") {
      EXPECT_THAT(parameter->packing.tensors, ElementsAre(Rows{{0, 10}}, Rows{{10, 20}}));
      EXPECT_THAT(shapes_of(parameter), ElementsAre(std::pair(120, 10)));
    }
  }
}

TEST(WholeMatrices, AreDealtOutEvenly) {
  EXPECT_THAT(engine::deal_out(std::vector<double>{2, 2, 2, 3, 9, 2}, 3), ElementsAre(2, 2, 1, 1, 0, 2));
  EXPECT_THAT(engine::deal_out(std::vector<double>{1, 5}, 4), ElementsAre(1, 0));
  EXPECT_THAT(engine::deal_out(std::vector<double>{}, 2), ElementsAre());
}

/// Llama's matrices, of which queries are larger than keys, beside AdamW and a group of other coefficients.
RunSpec muon(int stage, int ranks) {
  RunSpec spec;
  spec.stage = stage, spec.ranks = ranks, spec.steps = 6, spec.accumulation = 2, spec.tied = false;
  spec.optimizer = R"("type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1})";
  spec.groups =
      R"([{"match": "*projection*", "ns_steps": 2, "adjust_lr_fn": "match_rms_adamw", "lr": 0.05}])";
  return spec;
}

TEST(Muon, TrainsOtherwiseThanAdamW) {
  RunSpec adam = muon(0, 1);
  adam.optimizer = R"("type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1})", adam.groups.clear();
  EXPECT_NE(train_local(muon(0, 1)).losses, train_local(adam).losses);
}

TEST(Muon, StagesAndTiersGiveTheSameBits) {
  const TempFolder folder;
  constexpr std::string_view dtypes[] = {"bf16", "fp32", "fp16"}, tiers[] = {"none", "cpu", "nvme"};
  for (const std::string_view dtype : dtypes)
    for (const bool llama : {false, true}) {
      RunSpec base = muon(2, 3);
      base.dtype = dtype, base.llama = llama, base.steps = 4;
      const RunResult expected = train_local(base);
      ASSERT_NE(expected.losses.front(), expected.losses.back());
      for (const int stage : {2, 3})
        for (const std::string_view tier : tiers) {
          if (!to_run({3, 2, 2, 3}, {place_of(dtype, dtypes), llama, stage - 2, place_of(tier, tiers)}))
            continue;
          RunSpec spec = base;
          spec.stage = stage, spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
          spec.sub_group = 4096;
          EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << dtype << stage << tier;
        }
    }
}

TEST(Muon, ReplicatedStatesGiveTheSameBits) {
  for (const char* moments : {"fp32", "bf16"}) {
    RunSpec whole = muon(3, 4);
    whole.accumulation = 1, whole.moments = moments;
    const RunResult expected = train_local(whole);
    for (const int shard_size : {1, 2, 4})
      for (const int stage : {0, 1, 3}) {
        const int least = stage == 3 ? 2 : stage;
        if (!to_run({2, 3, 3}, {whole.moments == "bf16", shard_size / 2, least})) continue;
        RunSpec spec = whole;
        spec.shard_size = shard_size, spec.stage = stage, spec.split_masters = stage != 1;
        EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << shard_size << ", stage " << stage;
      }
  }
}

TEST(Muon, AnyNumberOfRanksGivesTheSameBits) {
  const auto on = [](int ranks) {
    RunSpec spec = muon(3, ranks);
    spec.accumulation = 12 / ranks, spec.accumulate_in = "fp32", spec.llama = true;
    return spec;
  };
  const RunResult expected = train_local(on(1));
  for (const int ranks : {2, 3, 6, 12})
    EXPECT_TRUE(train_local(on(ranks)).bits() == expected.bits()) << ranks << " ranks";
  const TempFolder folder;
  RunResult got;
  for (const auto& [ranks, stage, from, last] : {std::tuple{4, 3, 0, 2}, {3, 2, 2, 4}, {1, 3, 4, 6}}) {
    RunSpec spec = on(ranks);
    spec.stage = stage, spec.directory = folder.path().string();
    got = train_local(spec, from, last);
  }
  EXPECT_TRUE(got.masters == expected.masters) << "out of checkpoints of other numbers of ranks";
}

TEST(Muon, RestartsGiveTheSameBits) {
  const TempFolder folder;
  for (const char* tier : {"none", "nvme"}) {
    RunSpec spec = muon(2, 2);
    spec.moments = "bf16", spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
    const RunResult expected = train_local(spec);
    spec.resume_at = 3, spec.directory = folder.path().string();
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << tier;
  }
}

TEST(Muon, StagesOfAPipelineGiveTheSameBits) {
  const RunResult two = train_local(muon(2, 2));
  for (const int stages : {2, 3}) {
    RunSpec spec = muon(2, 2 * stages);
    spec.pipeline = stages;
    EXPECT_TRUE(train_local(spec).bits() == two.bits()) << stages << " stages";
  }
}

TEST(Muon, LateUpdatesOnNvmeGiveTheSameBits) {
  const TempFolder folder;
  RunSpec spec = muon(3, 2);
  const RunResult expected = train_local(spec);
  spec.offload_param = spec.offload_optimizer = "nvme", spec.nvme_path = folder.path().string();
  spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 2)", spec.sub_group = 4096;
  spec.recompute = "full";
  for (const char* schedule : {"accumulate", "layered"})
    for (const char* buffers : {R"(, "buffer_count": 1)", R"(, "buffer_count": 5)"}) {
      spec.schedule = schedule, spec.offload_extra = buffers;
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << schedule << buffers;
    }
}

/// Momenta in the first pass, weights in the second: everything comes and goes once.
/// Each chunk passes through a buffer twice.
TEST(Muon, FewerChunksOnNvmeThanBuffersGiveTheSameBits) {
  const TempFolder folder;
  for (const int layers : {1, 2, 3}) {
    RunSpec spec = muon(2, 1);
    spec.layers = layers, spec.adapter = R"("type": "lora", "rank": 4)";
    const RunResult expected = train_local(spec);
    spec.offload_optimizer = "nvme", spec.nvme_path = folder.path().string();
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << layers;
  }
}

TEST(Muon, StatesOnNvmeAreReadAndWrittenOnce) {
  const TempFolder folder;
  RunSpec sgd = muon(1, 1);
  sgd.groups.clear(), sgd.offload_optimizer = "nvme", sgd.nvme_path = folder.path().string();
  RunSpec spec = sgd;
  sgd.optimizer = R"("type": "SGD", "params": {"lr": 0.01, "momentum": 0.9})";
  sgd.groups = R"([{"match": ["tokens*", "positions*", "head*", "*norm*", "*bias"], "type": "AdamW"}])";
  const engine::IoBytes expected = train_local(sgd).io, got = train_local(spec).io;
  EXPECT_NEAR(static_cast<double>(got.read), static_cast<double>(expected.read),
              0.05 * double(expected.read));
  EXPECT_NEAR(static_cast<double>(got.written), static_cast<double>(expected.written),
              0.05 * double(expected.written));
}

TEST(Muon, NoUpdateBeginsBesideBackward) {
  const TempFolder folder;
  RunSpec spec = muon(2, 2);
  spec.clipping = 0, spec.check_overflow = false;
  const RunResult expected = train_local(spec);
  for (const char* tier : {"cpu", "nvme"}) {
    spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << tier;
  }
}

/// Rows of queries, keys and values and of the MLP's first matrix are cut, columns of its second; with 4
/// ranks a shard ends within them, too.
TEST(Muon, MatricesThatTensorRanksCutAreTakenWhole) {
  for (const bool llama : {false, true}) {
    RunSpec whole = muon(2, 1);
    whole.dtype = "fp32", whole.dropout = 0, whole.llama = llama;
    const RunResult one = train_local(whole);
    for (const int data : {1, 2}) {
      RunSpec spec = whole;
      spec.tensor = 2, spec.ranks = 2 * data, spec.accumulation = 2 / data;
      const RunResult cut = train_local(spec);
      for (std::size_t step = 0; step < one.losses.size(); ++step)
        EXPECT_NEAR(cut.losses[step], one.losses[step], 1e-4 * one.losses[step]) << llama << data << step;
    }
  }
}

/// One of LoRA's two matrices is cut, and each tensor rank finds a part of the other's gradient: neighbours
/// that lie on the same ranks, and not alike.
TEST(Muon, MatricesOfAdaptersThatTensorRanksCutOrShardAreTakenWhole) {
  RunSpec whole = muon(2, 1);
  whole.dtype = "fp32", whole.dropout = 0;
  whole.adapter = R"("type": "lora", "rank": 4, "targets": "all-linear")";
  const RunResult one = train_local(whole);
  for (const int stage : {0, 1, 2, 3}) {
    RunSpec spec = whole;
    spec.stage = stage, spec.tensor = 2, spec.ranks = 4, spec.accumulation = 1;
    const RunResult cut = train_local(spec);
    for (std::size_t step = 0; step < one.losses.size(); ++step) {
      EXPECT_NEAR(cut.losses[step], one.losses[step], 1e-5 * one.losses[step])
          << "stage " << stage << ", " << step;
      EXPECT_NEAR(cut.norms[step], one.norms[step], 1e-4 * one.norms[step])
          << "stage " << stage << ", " << step;
    }
  }
}

TEST(Muon, StagesTiersAndRestartsOfCutMatricesGiveTheSameBits) {
  const TempFolder folder;
  for (const int ranks : {2, 4, 6}) {
    RunSpec base = muon(2, ranks);
    base.tensor = 2, base.llama = ranks != 4;
    const RunResult expected = train_local(base);
    for (const int stage : {2, 3})
      for (const char* tier : {"none", "nvme"}) {
        RunSpec spec = base;
        spec.stage = stage, spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
        spec.sub_group = 512;
        EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << ranks << ' ' << stage << tier;
      }
    base.resume_at = 3, base.directory = folder.path().string();
    EXPECT_TRUE(train_local(base).bits() == expected.bits()) << ranks;
  }
}

/// All of the states on each rank: what a matrix's shards hold comes once, and goes to all.
TEST(Muon, ReplicatedStatesOfCutMatricesGiveTheSameBits) {
  RunSpec whole = muon(3, 4);
  whole.tensor = 2, whole.accumulation = 1;
  const RunResult expected = train_local(whole);
  for (const int shard_size : {1, 2})
    for (const int stage : {0, 1, 3}) {
      RunSpec spec = whole;
      spec.shard_size = shard_size, spec.stage = stage;
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << shard_size << ", stage " << stage;
    }
}

}  // namespace
}  // namespace sherd::test

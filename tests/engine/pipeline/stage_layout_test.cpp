#include "engine/pipeline/stage_layout.h"

#include <gmock/gmock.h>

#include "engine/pipeline/train_schedule.h"
#include "engine/setup/process_grid.h"
#include "nn/layers.h"
#include "tests/support/expect_error.h"

namespace sherd::engine {
namespace {

using sharding::Chunk;
using sherd::testing::expect_error;
using Weights = std::vector<std::int64_t>;

class WideLinear : public nn::Linear {
 public:
  using Linear::Linear;
};

/// Table and positions, four blocks of 4·4 + 4 elements (the third one of 12·4 + 12, which are frozen), and a
/// head that is the table.
class Ladder : public nn::LayeredModel {
 public:
  explicit Ladder(bool tied = true, bool forgets_head = false, int frozen = 2) {
    const auto table = add("table", std::make_shared<nn::Embedding>(10, 4));
    const auto positions = add("positions", std::make_shared<nn::LearnedPositions>(3, 4));
    append_part({table, positions});
    const auto blocks = add("blocks", std::make_shared<nn::LayerList>());
    for (int i = 0; i < 4; ++i) {
      const auto block = i == 2 ? std::make_shared<WideLinear>(4, 12) : std::make_shared<nn::Linear>(4, 4);
      blocks->append(block);
      if (i == frozen) block->freeze();
      append_part({block});
    }
    const auto head =
        add("head", std::make_shared<nn::Linear>(
                        4, 10, nn::LinearOptions{.bias = false, .tied = tied ? table->weight() : nullptr}));
    if (!forgets_head) append_part({head});
  }

 protected:
  nn::Var forward_part(nn::Tape&, std::size_t, const nn::Var& x, const tensor::Batch&) override { return x; }
};

class Plain : public nn::Model {
 protected:
  nn::Var forward(nn::Tape&, const tensor::Batch&) override { return {}; }
};

config::Parallel pipeline_of(int stages, const std::string& method = "best", int virtual_stages = 1) {
  config::Parallel parallel;
  parallel.pipeline = stages, parallel.partition_method = method, parallel.virtual_stages = virtual_stages;
  return parallel;
}

TEST(StageLayout, PartsWeighWhatTheMethodSays) {
  Ladder model;
  EXPECT_EQ(part_weights(model, "uniform"), Weights(6, 1));
  EXPECT_EQ(part_weights(model, "best"), Weights({0, 20, 20, 60, 20, 40})) << "no rows that are looked up";
  EXPECT_EQ(part_weights(model, "parameters"), Weights({52, 20, 20, 0, 20, 40})) << "what is trained";
  EXPECT_EQ(part_weights(model, "type:^linear$"), Weights({0, 1, 1, 0, 1, 1}));
  EXPECT_EQ(part_weights(model, "type:LINEAR"), Weights({0, 1, 1, 1, 1, 1}));
  EXPECT_EQ(part_weights(model, "type:^blocks"), Weights({0, 1, 1, 1, 1, 0})) << "by path";
  EXPECT_EQ(part_weights(model, "type:positions"), Weights({1, 0, 0, 0, 0, 0}));
  expect_error(ErrorKind::config,
               "no part of the model matches \"Attention\", by class or path; classes of its parts: "
               "Embedding, LearnedPositions, Linear, WideLinear",
               [&] { part_weights(model, "type:Attention"); });
}

TEST(StageLayout, ChunksGoAroundTheStages) {
  Ladder model;
  StageLayout layout = make_stage_layout(model, pipeline_of(2), 1);
  EXPECT_EQ(layout.chunks, (std::vector<Chunk>{{0, 4}, {4, 6}}));
  layout = make_stage_layout(model, pipeline_of(2, "uniform"), 1);
  EXPECT_EQ(layout.chunks, (std::vector<Chunk>{{0, 3}, {3, 6}}));
  layout = make_stage_layout(model, pipeline_of(2, "uniform", 3), 1);
  ASSERT_EQ(layout.own_chunks(), 3);
  EXPECT_EQ(layout.own(0), (Chunk{1, 2}));
  EXPECT_EQ(layout.all_own(), (std::vector<Chunk>{{1, 2}, {3, 4}, {5, 6}}));
  EXPECT_EQ(layout.own(2), (Chunk{5, 6}));
  for (std::size_t part = 0; part < 6; ++part) EXPECT_EQ(layout.stage_of(part), static_cast<int>(part % 2));
  EXPECT_FALSE(layout.has_first(0));
  EXPECT_TRUE(layout.has_last(2));
  EXPECT_FALSE(layout.has_last(1));
  layout.stage = 0;
  EXPECT_TRUE(layout.has_first(0));
  EXPECT_FALSE(layout.has_last(2));

  // A model that is not cut: all of its parts, or the whole of one that has none.
  EXPECT_EQ(make_stage_layout(model, pipeline_of(1), 0).chunks, (std::vector<Chunk>{{0, 6}}));
  Plain plain;
  EXPECT_EQ(make_stage_layout(plain, pipeline_of(1), 0), StageLayout{});
}

TEST(StageLayout, ATiedParameterIsOnEveryStageThatUsesIt) {
  Ladder model;
  model.assign_names();
  const auto names = [&](const StageLayout& layout) {
    std::map<std::string, std::vector<int>> out;
    for (const auto& [parameter, stages] : stages_of_parameters(model, layout)) out[parameter->name] = stages;
    return out;
  };
  const auto cut = names(make_stage_layout(model, pipeline_of(3, "uniform"), 0));
  EXPECT_EQ(cut.at("table.weight"), (std::vector<int>{0, 2}));
  EXPECT_EQ(cut.at("blocks.1.bias"), (std::vector<int>{1}));
  EXPECT_EQ(cut.at("positions.weight"), (std::vector<int>{0}));
  for (const auto& [name, stages] : names(make_stage_layout(model, pipeline_of(1), 0)))
    EXPECT_EQ(stages, (std::vector<int>{0})) << name;
}

TEST(StageLayout, WhatCannotBeCutSaysWhatWouldDo) {
  Ladder model;
  expect_error(ErrorKind::config, "parallel.pipeline is 7: 7 runs of parts, and the model has 6 parts",
               [&] { make_stage_layout(model, pipeline_of(7), 0); });
  expect_error(
      ErrorKind::config,
      "parallel.pipeline is 2, with 4 virtual stages each: 8 runs of parts, and the model has 6 parts; "
      "take parallel.pipeline x parallel.virtual_stages of at most 6",
      [&] { make_stage_layout(model, pipeline_of(2, "best", 4), 0); });
  Plain plain;
  expect_error(ErrorKind::config,
               "parallel.pipeline is 2, and the model offers no parts to cut it between: derive it from "
               "nn::LayeredModel (nn/layered_model.h) and declare its parts in order with append_part()",
               [&] { make_stage_layout(plain, pipeline_of(2), 0); });
  Ladder without_head(false, true);
  const StageLayout layout = make_stage_layout(without_head, pipeline_of(2), 0);
  expect_error(ErrorKind::config, "no part of the model has parameter 'head.weight'",
               [&] { stages_of_parameters(without_head, layout); });
}

/// Run part by part on one stage, too.
TEST(TrainSchedule, ParametersOutsideOfPartsAreNamed) {
  config::Config config;
  config.zero.stage = 3, config.zero.offload_param.device = config::OffloadDevice::cpu;
  config.training.recompute = Recompute::full;
  config.batch.gradient_accumulation_steps = 4;
  Ladder whole(false), without_head(false, true);
  const auto choose = [&](Ladder& model, config::Schedule schedule, int virtual_stages = 1) {
    model.assign_names();
    config.parallel = pipeline_of(1, "uniform", virtual_stages);
    config.parallel.schedule = schedule;
    return choose_schedule(config, model, make_stage_layout(model, config.parallel, 0), 1).schedule;
  };
  using enum config::Schedule;
  for (const auto& [schedule, chunks] : {std::pair{layered, 1}, {interleaved, 2}}) {
    EXPECT_EQ(choose(whole, schedule, chunks), schedule);
    expect_error(
        ErrorKind::config,
        "no part has parameter 'head.weight': give its module to append_part(), or choose accumulate",
        [&] { choose(without_head, schedule, chunks); });
  }
  EXPECT_EQ(choose(whole, automatic), layered);
  EXPECT_EQ(choose(without_head, automatic), accumulate);
  EXPECT_EQ(choose(without_head, gpipe), gpipe) << "all of it at once";
}

config::Config config_of(const config::Parallel& parallel) {
  config::Config config;
  config.parallel = parallel;
  return config;
}

/// On two stages of two data ranks each.
TEST(StageLayout, RanksThatCutOtherwiseAreToldOnAllOfThem) {
  const auto told = [](const std::string& message, const auto& build, const config::Parallel& parallel) {
    launch_ranks(4, [&](DistributedPtr dist) {
      const auto groups = make_groups(dist, config_of(parallel));
      const std::shared_ptr<nn::Model> model = build(dist->rank());
      expect_error(ErrorKind::config, message,
                   [&] { agree_on_stages(*model, config_of(parallel), *groups, *dist, true); });
      dist->world().barrier();  // all of them can go on
    });
  };
  const auto tied = [](int) { return std::make_shared<Ladder>(); };
  told("8 runs of parts", tied, pipeline_of(4, "best", 2));
  told(
      "the model offers no parts", [](int) { return std::make_shared<Plain>(); }, pipeline_of(2));
  told(
      "rank 2 has other parameters in the stages of its model than rank 0",
      [](int rank) { return std::make_shared<Ladder>(rank != 2); }, pipeline_of(2));
  told(
      "the model offers no parts",
      [](int rank) -> std::shared_ptr<nn::Model> {
        if (rank == 3) return std::make_shared<Plain>();
        return std::make_shared<Ladder>();
      },
      pipeline_of(2));
  told(
      "rank 1 has its model cut into stages at other parts than rank 0",
      [](int rank) { return std::make_shared<Ladder>(true, false, rank == 1 ? 0 : 2); },
      pipeline_of(2, "parameters"));
}

/// World ranks of the group, in its order.
std::vector<int> members(comm::Communicator& group, int rank) {
  const auto device = device::make_cpu_device(1);
  const tensor::Tensor mine = tensor::Tensor::of<std::int32_t>(*device, {1}, std::span(&rank, 1));
  const tensor::Tensor all = tensor::Tensor::empty(*device, {group.size()}, DType::i32);
  group.all_gather({{mine, all}});
  return {all.data<std::int32_t>(), all.data<std::int32_t>() + group.size()};
}

/// Two stages of two replicas of two shards.
TEST(StateGroups, ReplicasOfATiedParameterAreOnAllItsStages) {
  launch_ranks(8, [](DistributedPtr dist) {
    config::Config config = config_of(pipeline_of(2));
    config.parallel.shard_size = 2;
    const auto groups = make_groups(dist, config);
    Ladder model;
    const StageLayout layout = agree_on_stages(model, config, *groups, *dist, true);
    EXPECT_EQ(layout.stage, dist->rank() / 4);
    const StateGroups of(model, layout, *groups);
    const int rank = dist->rank(), first = rank % 2;
    for (const auto& parameter : model.parameters()) {
      const sharding::RankGroups ranks = of.of(*parameter);
      const bool tied = parameter->name == "table.weight";
      EXPECT_EQ(ranks.over_stages, tied) << parameter->name;
      EXPECT_EQ(ranks.shard, &groups->group(comm::Axis::shard));
      EXPECT_EQ(ranks.holders(), tied ? 4 : 2);
      if (tied)
        EXPECT_EQ(members(*ranks.replica, rank), (std::vector<int>{first, first + 2, first + 4, first + 6}));
      else
        EXPECT_EQ(ranks.replica, &groups->group(comm::Axis::replica));
    }
    EXPECT_EQ(of.of(*model.parameters()[0]).holder(), rank / 2) << "each holder once";
  });
}

TEST(StateGroups, TheLayoutIsNamed) {
  EXPECT_EQ(describe(comm::Grid(8, {.tensor = 2, .pipeline = 2})),
            "tensor 2 x context 1 x data 2 x pipeline 2");
  EXPECT_EQ(describe(comm::Grid(8, {.tensor = 2})), "tensor 2 x context 1 x data 4");
  config::Config config;
  adopt_grid(config, comm::Grid(8, {.pipeline = 4}));
  EXPECT_EQ(config.parallel.pipeline, 4);
  expect_error(ErrorKind::config, "parallel.pipeline is 4, and the groups that the program brings have 2",
               [&] { adopt_grid(config, comm::Grid(8, {.pipeline = 2})); });
}

}  // namespace
}  // namespace sherd::engine

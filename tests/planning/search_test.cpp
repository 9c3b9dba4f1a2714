// Which layouts a search finds, against layouts tried by hand.
#include "planning/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "support/expect_error.h"

namespace sherd::planning {
namespace {

using sherd::testing::expect_error;
using ::testing::HasSubstr;

constexpr std::int64_t ids = 512;

/// Machines of four GPUs that are near each other; others are far.
config::Machine machine(std::uint64_t memory = std::uint64_t{64} << 30) {
  config::Machine out;
  out.name = "four GPUs", out.devices = 4, out.memory = memory;
  config::DeviceRates rates;
  rates.products = {{.dtype = DType::bf16, .peak = 100e12, .efficiency = 0.7, .half_depth = 128}};
  rates.bandwidth = 1e12, rates.latency = 4e-6, rates.overlap = 0.5;
  out.rates = {rates};
  out.links = {{.name = "near", .ranks = 4, .bandwidth = 100e9, .latency = 5e-6},
               {.name = "far", .bandwidth = 5e9, .latency = 20e-6}};
  out.host.memory = std::uint64_t{1} << 40;
  return out;
}

constexpr const char* model = R"({"bf16": {"enabled": true}, "train_batch_size": 32,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"overlap_comm": true},
  "model": {"type": "gpt2", "seq_length": 512, "hidden_size": 512, "num_layers": 6, "num_heads": 8}})";

/// One whose states a GPU of this world cannot have all.
constexpr const char* large_model = R"({"bf16": {"enabled": true}, "train_batch_size": 32,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
  "model": {"type": "gpt2", "seq_length": 512, "hidden_size": 2048, "num_layers": 8, "num_heads": 16}})";

using Keys = std::vector<std::string>;

/// Searches with `keys` given beside the model's.
SearchResult search_with(const Keys& keys, const config::Machine& machine, const SearchOptions& options,
                         const char* text = model) {
  const auto reparse = [&](const Keys& more) {
    Keys all = keys;
    all.insert(all.end(), more.begin(), more.end());
    return config::parse_text(text, "test", all);
  };
  const auto is_given = [&](const std::string& key) {
    return std::any_of(keys.begin(), keys.end(),
                       [&](const std::string& each) { return each.starts_with(key + "="); });
  };
  return search(reparse, is_given, machine, ids, options);
}

Plan by_hand(const Keys& keys, const config::Machine& machine, int ranks) {
  return plan_as_is(config::parse_text(model, "test", keys), machine, ids, ranks);
}

/// Utilisation counts the model's FLOPs, whether its head goes by parts of the rows or not: a product of
/// forward thrice, of causal attention the half that is computed (Narayanan et al. 2021, appendix, less
/// recompute).
TEST(Plan, CountsTheModelsFlopsWhateverTheMicroBatch) {
  constexpr double h = 512, s = 512, layers = 6, tokens = 32 * s;
  const double expected = 3 * tokens * (layers * (24 * h * h + 2 * s * h) + 2 * h * ids);
  for (const int micro : {1, 4, 16}) {
    const config::Config config =
        config::parse_text(model, "test", {cat("train_micro_batch_size_per_gpu=", micro)});
    EXPECT_NEAR(plan_as_is(config, machine(), ids, 1).time.flops, expected, 0.01 * expected) << micro;
  }
}

TEST(Search, TheBestIsNoSlowerThanLayoutsByHand) {
  const config::Machine box = machine();
  const SearchResult found = search_with({}, box, {.ranks = 8});
  ASSERT_FALSE(found.best.empty());
  const double best = found.best.front().time.seconds;
  std::set<double> different;
  for (const char* tensor : {"1", "2", "4"})
    for (const char* pipeline : {"1", "2"})
      for (const char* stage : {"1", "2", "3"})
        for (const char* micro : {"1", "2", "4"}) {
          const Plan plan =
              by_hand({cat("parallel.tensor=", tensor), cat("parallel.pipeline=", pipeline),
                       cat("zero_optimization.stage=", stage), cat("train_micro_batch_size_per_gpu=", micro)},
                      box, 8);
          EXPECT_GE(plan.time.seconds, best * (1 - 1e-9)) << tensor << pipeline << stage << micro;
          different.insert(plan.time.seconds);
        }
  EXPECT_GT(different.size(), 30u) << "layouts have times of their own";
  EXPECT_GT(*different.rbegin(), 1.5 * best);
  for (std::size_t i = 1; i < found.best.size(); ++i)
    EXPECT_GE(found.best[i].time.seconds, found.best[i - 1].time.seconds);
}

/// With few micro-batches the bubble is most of what a pipeline costs: zero bubble's is the shortest without
/// chunks, and the keys that are given decide.
TEST(Search, TriesTheSchedulesOfAPipeline) {
  const Keys stages{"parallel.pipeline=4", "parallel.tensor=1", "parallel.virtual_stages=1",
                    "train_micro_batch_size_per_gpu=8"};
  const auto found = [&](Keys more) {
    more.insert(more.end(), stages.begin(), stages.end());
    const SearchResult result = search_with(more, machine(), {.ranks = 4, .one_of_each_grid = false});
    std::map<config::Schedule, double> least;
    for (const Plan& plan : result.best) {
      EXPECT_EQ(plan.config.parallel.schedule, plan.layout.schedule);
      EXPECT_EQ(plan.layout.text(1).find("zero bubble") != std::string::npos,
                plan.layout.schedule == config::Schedule::zero_bubble);
      least.try_emplace(plan.layout.schedule, plan.time.seconds);
    }
    return least;
  };
  const auto both = found({});
  ASSERT_EQ(both.size(), 2u);
  EXPECT_LT(both.at(config::Schedule::zero_bubble), 0.95 * both.at(config::Schedule::automatic));
  EXPECT_EQ(found({"parallel.schedule=gpipe"}).count(config::Schedule::gpipe), 1u);
  EXPECT_EQ(found({"parallel.schedule=gpipe"}).size(), 1u);
}

/// Stages 2 and 3 of ZeRO make a pipeline fit where stage 1 does not, with buckets small beside the model.
TEST(Search, ShardsTheStagesOfAPipeline) {
  const Keys keys{"parallel.pipeline=2",
                  "parallel.tensor=1",
                  "parallel.context=1",
                  "training.recompute=full",
                  "train_micro_batch_size_per_gpu=1",
                  "zero_optimization.reduce_bucket_size=1000000",
                  "zero_optimization.stage3_prefetch_bucket_size=1000000",
                  "zero_optimization.stage3_max_live_parameters=1000000"};
  const auto least_with = [&](const char* stage) {
    Keys all = keys;
    all.push_back(cat("zero_optimization.stage=", stage));
    return search_with(all, machine(), {.ranks = 8, .goal = Goal::memory, .top = 1}, large_model)
        .best.at(0)
        .memory;
  };
  ASSERT_LT(least_with("3"), least_with("1"));
  const std::uint64_t between = (least_with("3") + least_with("1")) / 2;
  const config::Machine box = machine(between + untracked_of_cuda +
                                      untracked_for_nccl({.pipeline = 2}, {8, 4}, capacity_of(machine())));
  const SearchResult some = search_with(keys, box, {.ranks = 8}, large_model);
  ASSERT_FALSE(some.best.empty()) << some.closest;
  EXPECT_GT(some.best.front().layout.stage, 1);
}

TEST(Search, APlansKeysMakeThePlan) {
  const config::Machine box = machine();
  std::vector<Plan> plans = search_with({}, box, {.ranks = 8}).best;
  for (Plan& plan : search_with({"parallel.pipeline=4"}, box, {.ranks = 8, .one_of_each_grid = false}).best)
    plans.push_back(std::move(plan));
  for (const Plan& plan : plans) {
    Keys keys;
    for (const auto& [key, value] : plan.layout.keys()) keys.push_back(cat(key, "=", value));
    const Plan again = by_hand(keys, box, plan.layout.ranks);
    EXPECT_EQ(again.layout, plan.layout);
    EXPECT_DOUBLE_EQ(again.time.seconds, plan.time.seconds);
    EXPECT_EQ(again.memory, plan.memory);
  }
}

TEST(Search, GivenKeysStay) {
  const Keys given{"parallel.tensor=2", "zero_optimization.stage=1", "train_micro_batch_size_per_gpu=2",
                   "training.recompute=selective"};
  const SearchResult found = search_with(given, machine(), {.ranks = 8});
  ASSERT_GE(found.best.size(), 2u);
  for (const Plan& plan : found.best) {
    EXPECT_EQ(plan.layout.tensor, 2);
    EXPECT_EQ(plan.layout.stage, 1);
    EXPECT_EQ(plan.layout.micro_batch, 2);
    EXPECT_EQ(plan.layout.recompute, Recompute::selective);
    EXPECT_EQ(plan.config.batch.train_batch_size, 32);
  }
}

TEST(Search, KeysThatSomeLayoutsCannotHaveLeaveTheOthers) {
  for (const char* key :
       {"parallel.schedule=zero_bubble", "parallel.schedule=accumulate", "parallel.shard_size=4"}) {
    const SearchResult found = search_with({key}, machine(), {.ranks = 8});
    EXPECT_FALSE(found.best.empty()) << key;
  }
  for (const Plan& plan : search_with({"gradient_accumulation_steps=4"}, machine(), {.ranks = 8}).best)
    EXPECT_EQ(plan.config.batch.gradient_accumulation_steps, 4);
}

TEST(Search, LinksDecideWhatIsFarApart) {
  config::Machine slow = machine();
  slow.links[0].bandwidth = 1e9, slow.links[1].bandwidth = 0.2e9;
  const SearchResult found = search_with({}, slow, {.ranks = 4, .top = 1});
  EXPECT_EQ(found.best.at(0).layout.tensor, 1) << "layers exchange more than a step does";
}

TEST(Search, WhatDoesNotFitIsLeftOut) {
  const SearchResult all = search_with({}, machine(), {.ranks = 4}, large_model);
  std::uint64_t least = ~std::uint64_t{0}, most = 0;
  for (const Plan& plan : all.best) least = std::min(least, plan.memory), most = std::max(most, plan.memory);
  ASSERT_LT(least, most);
  const std::uint64_t half = (least + most) / 2;
  const config::Parallel parallel;
  const config::Machine box =
      machine(half + untracked_of_cuda + untracked_for_nccl(parallel, {4, 4}, capacity_of(machine())));
  const SearchResult some = search_with({}, box, {.ranks = 4}, large_model);
  ASSERT_FALSE(some.best.empty()) << some.closest;
  for (const Plan& plan : some.best) EXPECT_LE(plan.memory, half);
  EXPECT_GT(some.too_large, all.too_large);
  EXPECT_GE(some.best.front().time.seconds, all.best.front().time.seconds);
  const SearchResult none = search_with({}, machine(std::uint64_t{1} << 30), {.ranks = 4}, large_model);
  EXPECT_TRUE(none.best.empty());
}

/// Ranks that two stages would not share evenly.
TEST(Search, LooksAtStagesOfAnyNumber) {
  const SearchResult found =
      search_with({"parallel.pipeline=3", "train_batch_size=36"}, machine(), {.ranks = 9}, large_model);
  ASSERT_FALSE(found.best.empty()) << found.closest;
  for (const Plan& plan : found.best) {
    std::uint64_t most = 0;
    for (const engine::Estimate& stage : estimate_stages(plan.config, ids, {9, 4}))
      most = std::max(most, stage.peaks.tiers[0].total_peak);
    EXPECT_NEAR(static_cast<double>(plan.memory), static_cast<double>(most), 64.0 * 36);
  }
}

TEST(Search, RoughMemoryIsNoMoreThanARunHolds) {
  for (const char* recompute : {"none", "selective", "full"})
    for (const char* pipeline : {"1", "2", "4"}) {
      GptWork work(ids);
      const Keys keys{cat("training.recompute=", recompute), cat("parallel.pipeline=", pipeline)};
      for (const Plan& plan : search_with(keys, machine(), {.ranks = 8}, large_model).best)
        EXPECT_LE(engine::rough_memory(plan.config, work.of(plan.config), 8).device,
                  static_cast<double>(plan.memory))
            << recompute << pipeline << ' ' << plan.layout.text(1) << plan.layout.stage;
    }
}

TEST(Search, PricesEachStageAsItIs) {
  const Keys alone{"parallel.tensor=1", "parallel.pipeline=1", "parallel.context=1",
                   "training.recompute=full"};
  const SearchResult found = search_with(alone, machine(std::uint64_t{5} << 30), {.ranks = 4}, large_model);
  ASSERT_FALSE(found.best.empty()) << found.closest;
  EXPECT_GT(found.best.front().layout.stage, 0) << "nothing is cut but states";
  EXPECT_EQ(found.best.front().config.zero.stage, found.best.front().layout.stage);
}

TEST(Search, SharesExpertsOut) {
  const Keys experts{"model.moe.experts=4", "model.moe.top_k=2", "parallel.tensor=1", "parallel.pipeline=1"};
  std::set<int> sizes;
  for (const Plan& plan : search_with(experts, machine(), {.ranks = 4}).best) {
    EXPECT_EQ(plan.config.parallel.expert, plan.layout.expert);
    EXPECT_EQ(plan.config.parallel.context, plan.layout.context);
    sizes.insert(plan.layout.expert);
  }
  EXPECT_EQ(sizes, (std::set<int>{1, 2, 4}));
}

TEST(Search, TheLeastMemoryIsAGoal) {
  const SearchResult quick = search_with({}, machine(), {.ranks = 4, .top = 1}),
                     small = search_with({}, machine(), {.ranks = 4, .goal = Goal::memory, .top = 1});
  EXPECT_LT(small.best.at(0).memory, quick.best.at(0).memory);
  EXPECT_GT(small.best.at(0).time.seconds, quick.best.at(0).time.seconds);
}

TEST(Search, FindsTheSmallestWorldThatTrains) {
  const config::Machine box = machine(std::uint64_t{5} << 30);
  const SearchResult found = search_with({}, box, {.ranks = 64, .goal = Goal::fewest_gpus}, large_model);
  ASSERT_FALSE(found.best.empty());
  const int ranks = found.best.front().layout.ranks;
  EXPECT_GT(ranks, 1);
  EXPECT_LT(ranks, 64);
  EXPECT_TRUE(search_with({}, box, {.ranks = ranks / 2}, large_model).best.empty());
}

TEST(Search, AnOpenBatchIsForTokensPerDay) {
  const std::string open =
      std::string(model).replace(std::string(model).find("\"train_batch_size\": 32,"), 23, "");
  expect_error(ErrorKind::config, "--global-batch",
               [&] { search_with({}, machine(), {.ranks = 4}, open.c_str()); });
  const SearchResult found =
      search_with({}, machine(), {.ranks = 4, .goal = Goal::tokens_per_day, .top = 5}, open.c_str());
  ASSERT_FALSE(found.best.empty());
  for (std::size_t i = 1; i < found.best.size(); ++i)
    EXPECT_LE(found.best[i].tokens_per_second(), found.best[i - 1].tokens_per_second());
  EXPECT_EQ(search_with({}, machine(), {.ranks = 4, .top = 1, .global_batch = 16}, open.c_str())
                .best.at(0)
                .config.batch.train_batch_size,
            16);
}

TEST(Search, OptimizersGoToTheHostWhereNothingElseFits) {
  config::Machine box = machine(std::uint64_t{6} << 30);
  EXPECT_TRUE(search_with({"training.recompute=full"}, box, {.ranks = 1}, large_model).best.empty());
  box.host.update = 50e9, box.host.to_device = box.host.from_device = 20e9;
  const SearchResult found = search_with({"training.recompute=full"}, box, {.ranks = 1}, large_model);
  ASSERT_FALSE(found.best.empty()) << found.closest;
  EXPECT_TRUE(found.best.front().layout.optimizer_on_host);
  EXPECT_GT(found.best.front().host_memory, 0u);
  box.host.memory = found.best.front().host_memory / 2;
  const SearchResult none = search_with({"training.recompute=full"}, box, {.ranks = 1}, large_model);
  EXPECT_TRUE(none.best.empty()) << "the host lacks memory";
  EXPECT_NE(none.closest.find("memory of this machine"), std::string::npos) << none.closest;
}

}  // namespace
}  // namespace sherd::planning

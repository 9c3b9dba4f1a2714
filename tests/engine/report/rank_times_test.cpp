// Who is slow, and at what: on times made up here, and on ranks that sleep.
#include "engine/report/rank_times.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "autograd/ops.h"
#include "engine/initialize.h"
#include "engine/report/metrics.h"
#include "engine/trainer.h"
#include "nn/layers.h"

namespace sherd::engine {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// Times of 30 ms, of which each of the first three parts is 10.
RankTimes usual() {
  RankTimes times;
  times.parts = {10, 10, 10, 0, 0, 0};
  return times;
}
RankTimes slower_at(RankTimes::Part part, float ms) {
  RankTimes times = usual();
  times.parts[part] += ms;
  return times;
}

/// The lines of so many equal steps.
std::vector<std::string> lines_of(StragglerWatch& watch, const std::vector<RankTimes>& ranks, int steps) {
  std::vector<std::string> all;
  for (int i = 0; i < steps; ++i)
    for (std::string& line : watch.add(ranks)) all.push_back(std::move(line));
  return all;
}

TEST(StragglerWatch, NamesASlowRankOnceAndAgainWhereItsCauseChanges) {
  StragglerWatch watch({0, 0, 0, 0});
  std::vector<RankTimes> ranks(4, usual());
  EXPECT_THAT(lines_of(watch, ranks, 100), IsEmpty());
  ranks[2] = slower_at(RankTimes::backward, 7);  // 37 of 30: beyond 1.2 times
  EXPECT_THAT(lines_of(watch, ranks, 19), IsEmpty());
  EXPECT_THAT(
      lines_of(watch, ranks, 1),
      ElementsAre("rank 2 is slow: 37.0 ms of its own a step, against 30.0 ms in the median of its peers, "
                  "over 20 steps; most of that in backward (17.0 against 10.0 ms)"));
  EXPECT_THAT(lines_of(watch, ranks, 200), IsEmpty()) << "told once";
  ranks[2] = slower_at(RankTimes::data, 9);
  EXPECT_THAT(lines_of(watch, ranks, 60),
              ElementsAre(HasSubstr("most of that in data (9.00 against 0.00 ms)")));
  for (int i = 0; i < 4; ++i) {  // chance
    ranks[2] = slower_at(i % 2 == 0 ? RankTimes::update : RankTimes::data, 9);
    EXPECT_THAT(lines_of(watch, ranks, 20), IsEmpty());
    ranks[2] = usual();
    EXPECT_THAT(lines_of(watch, ranks, i == 3 ? 100 : 40), IsEmpty());
  }
  ranks[2] = slower_at(RankTimes::data, 9);
  EXPECT_THAT(lines_of(watch, ranks, 20), ElementsAre(HasSubstr("rank 2 is slow"))) << "was fast meanwhile";
}

TEST(StragglerWatch, PassesOverSmallDifferencesAndFewSlowSteps) {
  StragglerWatch watch({0, 0, 0});
  std::vector<RankTimes> ranks(3, usual()), some = ranks, tiny(3);
  ranks[1] = slower_at(RankTimes::forward, 5.9f);  // less than a fifth
  EXPECT_THAT(lines_of(watch, ranks, 40), IsEmpty());
  some[1] = slower_at(RankTimes::storage, 100);
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(lines_of(watch, some, 9), IsEmpty());
    EXPECT_THAT(lines_of(watch, std::vector<RankTimes>(3, usual()), 11), IsEmpty());
  }
  for (RankTimes& each : tiny) each.parts[0] = 0.1f;
  tiny[0].parts[0] = 0.9f;  // nine times as long, and less than a millisecond
  EXPECT_THAT(lines_of(watch, tiny, 20), IsEmpty());
}

TEST(StragglerWatch, ComparesRanksOfOneStage) {
  StragglerWatch watch({0, 0, 1, 1});
  std::vector<RankTimes> ranks(4, usual());
  ranks[2] = ranks[3] = slower_at(RankTimes::forward, 100);
  EXPECT_THAT(lines_of(watch, ranks, 40), IsEmpty()) << "stages differ by design";
  ranks[3] = slower_at(RankTimes::update, 200);
  EXPECT_THAT(lines_of(watch, ranks, 20), ElementsAre(AllOf(HasSubstr("rank 3 "), HasSubstr("in update"))));
}

TEST(StragglerWatch, OfTwoRanksTheFasterIsTheMeasure) {
  StragglerWatch watch({0, 0});
  EXPECT_THAT(lines_of(watch, {slower_at(RankTimes::rest, 7), usual()}, 20),
              ElementsAre(HasSubstr("rank 0 ")));
}

TEST(StragglerWatch, ManyAreNotALineEach) {
  StragglerWatch watch(std::vector<int>(40, 0));
  std::vector<RankTimes> ranks(40, usual());
  for (int r = 0; r < 10; ++r) ranks[static_cast<std::size_t>(r)] = slower_at(RankTimes::data, 50);
  const std::vector<std::string> lines = lines_of(watch, ranks, 20);
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(lines[4], "so are 6 other ranks");
}

TEST(RankTimes, TableTellsMeansPerStepAndWhatIsSlow) {
  std::vector<RankTimes> totals(3, usual());
  totals[1] = slower_at(RankTimes::data, 20);
  totals[0].wait = 20;
  const std::string table = ranks_table(totals, {0, 0, 0}, 2);
  EXPECT_THAT(table, HasSubstr("rank 0                      15.0  0.00  0.00             10.0        -\n"))
      << table;
  EXPECT_THAT(table, HasSubstr("rank 1                      25.0  10.0  0.00             0.00     data\n"))
      << table;
  std::vector<RankTimes> many(100, usual());
  many[77] = slower_at(RankTimes::update, 30);
  const std::string short_table = ranks_table(many, std::vector<int>(100, 0), 1);
  EXPECT_EQ(std::count(short_table.begin(), short_table.end(), '\n'), 18);
  EXPECT_LT(short_table.find("rank 77 "), short_table.find("rank 0 "));
  EXPECT_THAT(short_table, HasSubstr("(the median of 100)"));
}

TEST(RankTimes, MetricsListFewRanksAndSumUpMany) {
  StepMetrics line;
  EXPECT_FALSE(nlohmann::json::parse(to_json(line)).contains("ranks"));
  line.ranks.assign(3, usual());
  line.ranks[1] = slower_at(RankTimes::storage, 1.5f);
  line.ranks[2].wait = 4.25f;
  auto ranks = nlohmann::json::parse(to_json(line))["ranks"];
  EXPECT_EQ(ranks["compute_ms"], nlohmann::json({30, 31.5, 30}));
  EXPECT_EQ(ranks["wait_ms"], nlohmann::json({0, 0, 4.25}));
  EXPECT_EQ(ranks["data_ms"], nlohmann::json({0, 0, 0}));
  EXPECT_EQ(ranks["nvme_ms"], nlohmann::json({0, 1.5, 0}));
  line.ranks.resize(17, usual());
  ranks = nlohmann::json::parse(to_json(line))["ranks"];
  EXPECT_EQ(ranks["compute_ms"], nlohmann::json::parse(R"({"slowest":1,"min":30,"median":30,"max":31.5})"));
  EXPECT_EQ(ranks["wait_ms"]["slowest"], 2);
}

// ---- ranks that sleep ----

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

/// A line, on which every rank spends a while, and one rank more.
class SleepingLine : public nn::Model {
 public:
  explicit SleepingLine(int ms) : ms_(ms), linear_(add("linear", std::make_shared<nn::Linear>(1, 1))) {}

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    sleep_ms(ms_);
    return autograd::mean_squared_error((*linear_)(tape, tape.input(batch.at("x"))), batch.at("x"));
  }

 private:
  int ms_;
  std::shared_ptr<nn::Linear> linear_;
};

/// Samples of which each takes a while.
class SleepingData : public data::Dataset {
 public:
  SleepingData(std::shared_ptr<const data::Dataset> from, int ms) : from_(std::move(from)), ms_(ms) {}
  std::int64_t size() const override { return from_->size(); }
  tensor::Batch get(std::int64_t index) const override {
    sleep_ms(ms_);
    return from_->get(index);
  }

 private:
  std::shared_ptr<const data::Dataset> from_;
  int ms_;
};

/// Rank 0's log and table of a run on three ranks, of which rank 1 sleeps longer, and each rank's times of
/// all steps together: that a processor is busy now and then must not decide.
constexpr int watched_steps = 20;
struct Watched {
  std::string log, table;
  std::vector<RankTimes> sums = std::vector<RankTimes>(3);

  void add(const std::vector<RankTimes>& step) {
    ASSERT_EQ(step.size(), sums.size());
    for (std::size_t rank = 0; rank < sums.size(); ++rank) {
      for (std::size_t part = 0; part < step[rank].parts.size(); ++part)
        sums[rank].parts[part] += step[rank].parts[part];
      sums[rank].wait += step[rank].wait;
    }
  }
};
Watched watched_run(int forward_ms, int data_ms, int stage = 2) {
  const auto host = device::make_cpu_device(1);
  const auto x = tensor::Tensor::of<float>(*host, {12, 1}, std::vector<float>(12, 1));
  const auto points = data::make_tensor_dataset({{"x", x}});
  const config::Config config =
      config::parse_text(cat(R"({"train_batch_size": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
              "zero_optimization": {"stage": )",
                             stage, R"(}, "training": {"steps": )", watched_steps, "}}"));
  Watched out;
  std::mutex mutex;
  ::testing::internal::CaptureStderr();
  launch_ranks(3, [&](DistributedPtr dist) {
    const bool slow = dist->rank() == 1;
    auto made =
        initialize({.dist = dist,
                    .model = [&] { return std::make_shared<SleepingLine>(slow ? 4 + forward_ms : 4); },
                    .config = config,
                    .training_data = std::make_shared<SleepingData>(points, slow ? data_ms : 0)});
    Trainer trainer(*made.engine, *made.loader,
                    {.progress = false, .after_step = [&](const StepMetrics& line) {
                       const std::lock_guard lock(mutex);
                       if (dist->rank() == 0) out.add(line.ranks);
                     }});
    trainer.run();
    if (dist->rank() == 0) out.table = trainer.ranks_table();
  });
  out.log = ::testing::internal::GetCapturedStderr();
  return out;
}

TEST(RankWatch, ARankThatSleepsInItsForwardIsNamed) {
  const Watched run = watched_run(8, 0);
  EXPECT_THAT(run.log, AllOf(HasSubstr("rank 1 is slow"), HasSubstr("most of that in forward")));
  EXPECT_THAT(run.log, AllOf(Not(HasSubstr("rank 0 is slow")), Not(HasSubstr("rank 2 is slow"))));
  EXPECT_GE(run.sums[1].parts[RankTimes::forward], watched_steps * 12);
  EXPECT_LT(run.sums[0].own(), run.sums[1].own() - watched_steps * 4);
  EXPECT_GT(run.sums[0].wait, watched_steps * 4) << "the others wait for it";
  EXPECT_LT(run.sums[1].wait, run.sums[0].wait - watched_steps * 4);
  EXPECT_THAT(run.table, HasSubstr("forward\n"));
}

TEST(RankWatch, ARankWhoseDataComeLateIsNamed) {
  const Watched run = watched_run(0, 8);
  EXPECT_THAT(run.log, AllOf(HasSubstr("rank 1 is slow"), HasSubstr("most of that in data")));
  EXPECT_GE(run.sums[1].parts[RankTimes::data], watched_steps * 8);
  EXPECT_LT(run.sums[1].parts[RankTimes::forward], run.sums[0].parts[RankTimes::forward] + watched_steps * 4)
      << "what the loader takes is none of forward's";
}

TEST(RankWatch, EqualRanksAreNot) {
  const Watched run = watched_run(0, 0, 0);
  EXPECT_THAT(run.log, Not(HasSubstr("is slow")));
  EXPECT_THAT(run.table, Not(HasSubstr("forward\n")));
}

}  // namespace
}  // namespace sherd::engine

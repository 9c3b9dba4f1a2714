// The ranks' records of their steps: bubbles against the formulas of the papers, and the file.
#include "engine/report/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "engine/engine.h"
#include "engine/initialize.h"
#include "engine/trace/sleeping_model.h"
#include "sharding/schedule/schedules.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using engine::Trace;
using engine::TraceTotals;
using std::chrono::milliseconds;

config::Config config_of(int stages, int micro_batches, int virtual_stages, const std::string& schedule) {
  return config::parse_text(
      cat(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": )", micro_batches,
          R"(, "gradient_clipping": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},)",
          R"("parallel": {"pipeline": )", stages, R"(, "partition_method": "uniform", "virtual_stages": )",
          virtual_stages, R"(, "schedule": ")", schedule, R"("}})"));
}

tensor::Batch batch_on(Engine& engine) {
  tensor::Tensor x = tensor::Tensor::empty(engine.device(), {1, 8}, DType::f32);
  engine.kernels().fill(x, 0);
  return {{"x", x}};
}

/// The least bubble of a few steps: what disturbs a run only makes it larger.
double bubble(const std::string& schedule, int stages, int micro_batches, int virtual_stages,
              milliseconds each) {
  std::mutex mutex;
  std::vector<TraceTotals> sums(full_suite() ? 4 : 2);
  launch_ranks(stages, [&](DistributedPtr dist) {
    Engine engine(dist, sleeping_model(stages * virtual_stages, each),
                  config_of(stages, micro_batches, virtual_stages, schedule));
    for (TraceTotals& sum : sums) {
      Trace trace;
      engine.set_trace(&trace);
      engine.train_batch([&] { return batch_on(engine); });
      engine.set_trace(nullptr);
      const TraceTotals mine = trace.totals();
      const std::lock_guard lock(mutex);
      sum.steps += mine.steps, sum.computing += mine.computing;
    }
  });
  double least = 1e9;
  for (const TraceTotals& sum : sums) least = std::min(least, sum.steps / sum.computing - 1);
  return least;
}

TEST(Bubble, OfLayersThatSleepIsWhatThePapersSay) {
  const double tolerance = full_suite() ? 0.05 : 0.25;  // the full suite runs with nothing beside it
  for (const int p : {2, 4, 8}) {
    if (p == 8 && !full_suite()) continue;
    const milliseconds each(p == 2 ? 25 : 12);
    const double expected = (p - 1.0) / p;  // as many micro-batches as stages
    // Other work of the machine makes bubbles longer, by less of them the longer the layers sleep.
    const auto expect_near = [&](const char* schedule, int chunks, double formula) {
      double found = 1;
      for (int attempt = 0; attempt < 5 && found > formula * (1 + tolerance); ++attempt)
        found = std::min(found, bubble(schedule, p, p, chunks, (1 + attempt) * each));
      RecordProperty(cat(schedule, "_p", p), cat(found, " of ", formula));
      EXPECT_NEAR(found, formula, tolerance * formula) << schedule << ", p = " << p;
      return found;
    };
    const double plain = expect_near("1f1b", 1, expected);
    expect_near("gpipe", 1, expected);
    expect_near("interleaved", 2, expected / 2);
    const double split = expect_near("zero_bubble", 1, expected / 3);
    EXPECT_LE(split, plain / 2);
  }
}

// ---- the file ----

/// Instructions of a rank in the file, in order, as the schedule lists them.
std::vector<std::pair<std::string, std::int64_t>> instructions_of(const nlohmann::json& file, int rank) {
  std::vector<std::pair<std::string, std::int64_t>> found;
  double end = 0;
  for (const auto& event : file.at("traceEvents")) {
    if (event.at("pid") != rank || event.value("cat", "") != "instruction") continue;
    found.emplace_back(event.at("name"), event.at("args").at("micro_batch"));
    EXPECT_GE(event.at("ts").get<double>() + 0.002, end) << "instructions follow each other";
    end = event.at("ts").get<double>() + event.at("dur").get<double>();
  }
  return found;
}

TEST(TraceFile, HoldsTheListsOfAllRanksWithTheirWaits) {
  const sherd::testing::TempFolder folder;
  const std::string path = (folder.path() / "trace.json").string();
  launch_ranks(2, [&](DistributedPtr dist) {
    Engine engine(dist, sleeping_model(2, milliseconds(40)), config_of(2, 3, 1, "1f1b"));
    Trace trace;
    engine.set_trace(&trace);
    engine.train_batch([&] { return batch_on(engine); });
    engine.set_trace(nullptr);
    engine::write_trace(*dist, trace, path);
  });
  const nlohmann::json file = nlohmann::json::parse(std::ifstream(path));
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::pair<std::string, std::int64_t>> expected;
    for (const auto& i : sharding::one_forward_one_backward({.stages = 2, .stage = rank, .micro_batches = 3}))
      expected.emplace_back(sharding::name_of(i.op), i.micro_batch);
    EXPECT_EQ(instructions_of(file, rank), expected) << "rank " << rank;
  }
  int waits = 0, blocks = 0;
  for (const auto& event : file.at("traceEvents")) {
    waits += event.at("name") == "wait for stage";
    blocks += event.at("name") == "forward 1";
  }
  // No fewer, as long as a rank is not held up for 40 ms.
  EXPECT_GE(waits, 2) << "the last stage waits for its first activation, the first for its first gradient";
  EXPECT_EQ(blocks, 3);
}

TEST(Trace, TellsHowMuchOfIoIsBesideComputing) {
  using Op = sharding::Instruction::Op;
  Trace trace;
  const auto start = std::chrono::steady_clock::now();
  trace.begin({Op::forward, 0});
  std::this_thread::sleep_for(milliseconds(30));
  trace.begin_range("wait for read of", "h.0");
  std::this_thread::sleep_for(milliseconds(10));
  trace.end_range();
  trace.end({Op::forward, 0}, 0);
  const auto computed = std::chrono::steady_clock::now();
  trace.begin({Op::update, 0});
  std::this_thread::sleep_for(milliseconds(20));
  trace.end({Op::update, 0}, 0);
  const auto finished = std::chrono::steady_clock::now();
  // Two at once count once.
  trace.transferred({false, 100, start, computed + milliseconds(10)});
  trace.transferred({true, 100, start, computed});
  trace.transferred({false, 100, start - milliseconds(50), start - milliseconds(10)});  // a checkpoint's
  const TraceTotals totals = trace.totals();
  // The machine may stop this thread between any two lines: what was measured around them bounds the sums.
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  const double rounding = 1e-6;
  EXPECT_NEAR(totals.hidden_io, totals.computing, rounding);
  EXPECT_GE(totals.io, totals.computing + totals.storage + 0.010 - rounding);
  EXPECT_LE(totals.io, seconds(computed - start) + 0.010 + rounding);
  EXPECT_GE(totals.storage, 0.010);
  EXPECT_EQ(totals.step_count, 1);
  EXPECT_GE(totals.steps, totals.instructions[static_cast<std::size_t>(Op::forward)] +
                              totals.instructions[static_cast<std::size_t>(Op::update)] + totals.storage -
                              rounding);
  EXPECT_LE(totals.steps, seconds(finished - start) + rounding);
  const std::string table = engine::trace_table({totals}, 1);
  EXPECT_NE(table.find("waits for NVMe"), std::string::npos) << table;
  EXPECT_EQ(table.find("bubble"), std::string::npos) << table;
}

TEST(Trace, KeepsNoMoreThanItMay) {
  using Op = sharding::Instruction::Op;
  Trace trace(3);
  for (int m = 0; m < 5; ++m) {
    trace.begin({Op::forward, m});
    trace.end({Op::forward, m}, 0);
  }
  EXPECT_FALSE(trace.totals().whole);
  const auto events = nlohmann::json::parse("[" + trace.events(0) + "]");
  EXPECT_EQ(events.size(), 2 + 3) << "two of metadata";
  EXPECT_EQ(events.back().at("args").at("micro_batch"), 2);

  Trace of_transfers(1);
  const auto now = std::chrono::steady_clock::now();
  of_transfers.transferred({false, 100, now, now});
  EXPECT_TRUE(of_transfers.totals().whole);
  of_transfers.transferred({false, 100, now, now});
  EXPECT_FALSE(of_transfers.totals().whole);
}

}  // namespace
}  // namespace sherd::test

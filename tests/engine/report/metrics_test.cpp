#include "engine/report/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

StepMetrics example(std::int64_t step) {
  StepMetrics m;
  m.step = step, m.loss = 0.1, m.lr = 3e-4, m.grad_norm = 1.0 / 3, m.loss_scale = 65536, m.tokens = 4096;
  m.step_ms = 12.5, m.tokens_per_s = 327680, m.mfu = 0.5;
  m.mem = {1, 2, 3};
  m.comm.all_reduce = 4, m.comm.all_gather = 5, m.comm.reduce_scatter = 6, m.comm.all_to_all = 7,
  m.comm.p2p = 8, m.comm.broadcast = 3;
  m.axes = {{comm::Axis::shard, m.comm}, {comm::Axis::replica, {.p2p = 2, .scalars = 5}}};
  m.comm.scalars = 1000, m.io = {9, 10};
  return m;
}

TEST(Metrics, KeysAreFixedAndInOrder) {
  EXPECT_EQ(
      to_json(example(7)),
      R"({"step":7,"loss":0.1,"lr":3e-04,"grad_norm":0.3333333333333333,"loss_scale":65536,"skipped":false,)"
      R"("tokens":4096,"step_ms":12.5,"tokens_per_s":327680,"mfu":0.5,)"
      R"("mem":{"device_peak":1,"host_peak":2,"nvme_peak":3},)"
      R"("comm":{"all_reduce_bytes":4,"all_gather_bytes":5,"reduce_scatter_bytes":6,"all_to_all_bytes":7,)"
      R"("broadcast_bytes":3,"p2p_bytes":8,"axes":{"shard":33,"replica":2}},"io":{"read_bytes":9,"write_bytes":10}})");
  StepMetrics evaluated = example(8);
  evaluated.val_loss = 4.25, evaluated.skipped = true;
  EXPECT_NE(to_json(evaluated).find(R"("loss":0.1,"val_loss":4.25,"lr")"), std::string::npos);
  EXPECT_NE(to_json(evaluated).find(R"("skipped":true)"), std::string::npos);
}

TEST(Metrics, RatesOfSeveralGroupsFollowTheFirst) {
  StepMetrics m = example(7);
  m.lrs = {3e-4};
  EXPECT_EQ(to_json(m), to_json(example(7)));
  m.lrs = {3e-4, 0.5, std::numeric_limits<double>::infinity()};
  EXPECT_NE(to_json(m).find(R"("lr":3e-04,"lrs":[3e-04,0.5,null],"grad_norm")"), std::string::npos)
      << to_json(m);
}

TEST(Metrics, NumbersReadBackToTheSameBits) {
  for (const double value :
       {0.1f + 0.2, std::nextafter(2.5, 3.0), 1e-300, 6.02214076e23, -0.0, static_cast<double>(1.0f / 3)}) {
    StepMetrics m = example(1);
    m.loss = value;
    const std::string line = to_json(m);
    const double back = std::strtod(line.c_str() + line.find("loss\":") + 6, nullptr);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(back), std::bit_cast<std::uint64_t>(value)) << line;
  }
}

TEST(Metrics, WhatJsonCannotSayIsNull) {
  StepMetrics m = example(1);
  m.loss = std::numeric_limits<double>::quiet_NaN();
  m.grad_norm = std::numeric_limits<double>::infinity();
  m.mfu.reset();
  const std::string line = to_json(m);
  EXPECT_NE(line.find(R"("loss":null,)"), std::string::npos);
  EXPECT_NE(line.find(R"("grad_norm":null,)"), std::string::npos);
  EXPECT_NE(line.find(R"("mfu":null,)"), std::string::npos);
}

TEST(MetricsWriter, StartsANewFile) {
  TempFolder folder;
  write_text(folder / "m.jsonl", to_json(example(7)) + "\n");
  MetricsWriter writer(folder / "m.jsonl");
  writer.write(example(1));
  EXPECT_EQ(read_text(folder / "m.jsonl"), to_json(example(1)) + "\n");  // at once, not when closed
  writer.write(example(2));
  EXPECT_EQ(read_text(folder / "m.jsonl"), to_json(example(1)) + "\n" + to_json(example(2)) + "\n");
}

TEST(MetricsWriter, ReplacesNoOtherFile) {
  TempFolder folder;
  write_text(folder / "config.json", "{\n}\n");
  expect_error(ErrorKind::data, "is not a line of metrics. Give --metrics another file",
               [&] { MetricsWriter(folder / "config.json"); });
  EXPECT_EQ(read_text(folder / "config.json"), "{\n}\n");
}

TEST(MetricsWriter, ResumingDropsWhatWillBeDoneAgain) {
  TempFolder folder;
  std::string before;
  for (int step = 1; step <= 5; ++step) before += to_json(example(step)) + "\n";
  write_text(folder / "m.jsonl", before + R"({"step":6,"lo)");  // the machine stopped within a write
  MetricsWriter(folder / "m.jsonl", 4).write(example(4));
  std::string expected;
  for (int step = 1; step <= 4; ++step) expected += to_json(example(step)) + "\n";
  EXPECT_EQ(read_text(folder / "m.jsonl"), expected);

  MetricsWriter(folder / "new.jsonl", 4).write(example(4));
  EXPECT_EQ(read_text(folder / "new.jsonl"), to_json(example(4)) + "\n");
}

TEST(MetricsWriter, RefusesToDamageOtherFiles) {
  TempFolder folder;
  write_text(folder / "essay.txt", "{\"step\":1}\nSomething else\n");
  expect_error(ErrorKind::data, "line 2", [&] { MetricsWriter writer(folder / "essay.txt", 2); });
  EXPECT_EQ(read_text(folder / "essay.txt"), "{\"step\":1}\nSomething else\n");
  expect_error(ErrorKind::io, "No such file", [&] { MetricsWriter writer(folder / "no/folder/m.jsonl"); });
  MetricsWriter full("/dev/full");
  expect_error(ErrorKind::io, "No space", [&] { full.write(example(1)); });
}

}  // namespace
}  // namespace sherd::engine

#include "engine/report/step_record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "base/cpu_isa.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

const RunFacts facts{"0.1.0", "cpu", "avx2", "own tiles", 3, 4, "local(4)", 2};

StepMetrics step_of(std::int64_t step, double loss, double norm) {
  StepMetrics out;
  out.step = step, out.loss = loss, out.grad_norm = norm, out.loss_scale = 65536;
  out.skipped = !std::isfinite(norm);
  return out;
}

TEST(StepRecord, TellsStepsToTheBit) {
  const TempFolder folder;
  const double loss = 0.1 + 0.2, norm = std::nextafter(1.0 / 3, 1);
  std::string start;
  {
    StepRecord record(folder.path(), 0, facts);
    start = record.start();
    record.write(step_of(1, loss, norm));
    record.write(step_of(2, loss, std::numeric_limits<double>::infinity()));
  }
  std::ofstream(folder / "steps.jsonl", std::ios::app) << R"({"step":3,"loss":1.)";  // being written
  const RecordedSteps read = RecordedSteps::read(folder.path());
  ASSERT_EQ(read.starts.size(), 1u);
  EXPECT_EQ(read.starts[0].name, start);
  EXPECT_EQ(start.size(), 16u);
  const RunFacts& got = read.starts[0].facts;
  EXPECT_EQ(std::tie(got.version, got.device, got.instruction_set, got.libraries, got.threads, got.ranks,
                     got.world, got.micro_batch),
            std::tie(facts.version, facts.device, facts.instruction_set, facts.libraries, facts.threads,
                     facts.ranks, facts.world, facts.micro_batch));
  ASSERT_EQ(read.steps.size(), 2u);
  const RecordedSteps::Step& first = *read.find(1);
  EXPECT_EQ(first.loss, loss);
  EXPECT_EQ(first.grad_norm, norm);
  EXPECT_EQ(first.loss_scale, 65536);
  EXPECT_FALSE(first.skipped);
  EXPECT_FALSE(read.find(2)->grad_norm.has_value());
  EXPECT_TRUE(read.find(2)->skipped);
  EXPECT_EQ(read.find(0), nullptr);
  EXPECT_EQ(read.find(3), nullptr);
}

TEST(StepRecord, StepsThatRunAgainReplaceThoseThatWere) {
  const TempFolder folder;
  EXPECT_TRUE(RecordedSteps::read(folder.path()).starts.empty());
  {
    StepRecord record(folder.path(), 0, facts);
    for (int step = 1; step <= 4; ++step) record.write(step_of(step, step, 1));
  }
  {
    StepRecord record(folder.path(), 2, facts);
    record.write(step_of(3, 30, 1));
  }
  const RecordedSteps read = RecordedSteps::read(folder.path());
  ASSERT_EQ(read.starts.size(), 2u);
  EXPECT_NE(read.starts[0].name, read.starts[1].name);
  EXPECT_EQ(read.starts[1].steps_before, 2);
  ASSERT_EQ(read.steps.size(), 3u);
  EXPECT_EQ(read.find(2)->start, 0u);
  EXPECT_EQ(read.find(3)->start, 1u);
  EXPECT_EQ(read.find(3)->loss, 30);
  StepRecord(folder.path(), 0, facts);
  EXPECT_TRUE(RecordedSteps::read(folder.path()).steps.empty()) << "a run that begins anew";
}

/// Takes out a line.
void lose(const TempFolder& folder, int step) {
  std::string text = read_text(folder / "steps.jsonl");
  const std::size_t begin = text.find(cat("{\"step\":", step, ",\"loss\""));
  ASSERT_NE(begin, std::string::npos);
  text.erase(begin, text.find('\n', begin) + 1 - begin);
  write_text(folder / "steps.jsonl", text);
}

TEST(StepRecord, TellsALostLineFromOneThatIsNotThereForGoodReason) {
  using Steps = std::vector<std::int64_t>;
  const TempFolder folder;
  const auto steps = [&](std::int64_t before, int to) {
    StepRecord record(folder.path(), before, facts);
    for (std::int64_t step = before + 1; step <= to; ++step) record.write(step_of(step, 1, 1));
  };
  EXPECT_EQ(RecordedSteps().lost(0, 9, 0), Steps());
  steps(4, 8);   // the record begins there
  steps(6, 10);  // killed behind step 8, and continued from a checkpoint
  const auto lost = [&](std::int64_t begin, std::int64_t end, std::size_t starts) {
    return RecordedSteps::read(folder.path()).lost(begin, end, starts);
  };
  EXPECT_EQ(lost(0, 10, 2), Steps());
  for (const int step : {5, 7, 10}) lose(folder, step);
  EXPECT_EQ(lost(0, 10, 2), (Steps{5, 7, 10}));
  EXPECT_EQ(lost(5, 9, 2), Steps{7});
  EXPECT_EQ(lost(10, 12, 2), (Steps{11, 12})) << "the checkpoint of step 12 says that they were made";
  // For a checkpoint of the first start: that made steps 7 and on, too, and the second start replaced them.
  EXPECT_EQ(lost(4, 8, 1), Steps{5});
  EXPECT_EQ(lost(4, 10, 0), Steps()) << "its start is not known";
}

TEST(StepRecord, NamesALineThatIsNone) {
  const TempFolder folder;
  StepRecord(folder.path(), 0, facts).write(step_of(1, 1, 1));
  const std::string whole = read_text(folder / "steps.jsonl");
  write_text(folder / "steps.jsonl", whole + "{\"step\":2}\n");
  expect_error(ErrorKind::data, "line 3 of '", [&] { RecordedSteps::read(folder.path()); });
  write_text(folder / "steps.jsonl", whole + whole.substr(whole.find('\n') + 1));
  expect_error(ErrorKind::data, "is no valid record of a step", [&] { RecordedSteps::read(folder.path()); });
  write_text(folder / "steps.jsonl", "hello\n");
  expect_error(ErrorKind::data, "is not a line of a record of steps. Move the file away",
               [&] { StepRecord(folder.path(), 0, facts); });
}

}  // namespace
}  // namespace sherd::engine

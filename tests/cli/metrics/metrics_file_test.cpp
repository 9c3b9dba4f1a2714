#include "cli/metrics/metrics_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::cli {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::ElementsAre;

std::string line_of(int step, double loss) {
  return cat("{\"step\":", step, ",\"loss\":", loss, "}\n");
}

std::vector<double> steps_of(const Metrics& metrics, const char* name = "loss") {
  std::vector<double> out;
  for (const Point& point : metrics.of(name)) out.push_back(point.step);
  return out;
}

std::vector<double> values_of(const Metrics& metrics, const char* name) {
  std::vector<double> out;
  for (const Point& point : metrics.of(name)) out.push_back(point.value);
  return out;
}

void append(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::app) << text;
}

TEST(MetricsFile, GivesNumbersByTheirNames) {
  TempFolder folder;
  write_text(folder / "m",
             R"({"step":3,"loss":9.5,"objective":{"rewards/margins":0.25},"grad_norm":null,"skipped":true,)"
             R"("moe":{"layers":["a","b"],"imbalance":[1,2],"tokens":[[1,2],[3,4]],"z_loss":0.5},)"
             R"("comm":{"all_reduce_bytes":7,"axes":{"data":7}}})"
             "\n");
  const MetricsFile file = read_metrics(folder / "m");
  const Metrics& metrics = file.metrics();
  EXPECT_EQ(metrics.last_step(), 3);
  EXPECT_THAT(values_of(metrics, "loss"), ElementsAre(9.5));
  EXPECT_THAT(values_of(metrics, "objective.rewards/margins"), ElementsAre(0.25));
  EXPECT_THAT(values_of(metrics, "grad_norm"), ElementsAre());
  EXPECT_THAT(values_of(metrics, "skipped"), ElementsAre(1));
  EXPECT_THAT(values_of(metrics, "moe.imbalance"), ElementsAre(1.5));
  EXPECT_THAT(values_of(metrics, "moe.imbalance.most"), ElementsAre(2));
  EXPECT_THAT(values_of(metrics, "moe.tokens"), ElementsAre());
  EXPECT_THAT(values_of(metrics, "moe.z_loss"), ElementsAre(0.5));
  EXPECT_THAT(values_of(metrics, "comm.axes.data"), ElementsAre(7));
  EXPECT_THAT(metrics.names("comm."), ElementsAre("comm.all_reduce_bytes", "comm.axes.data"));
}

TEST(MetricsFile, FollowsAFileThatGrows) {
  TempFolder folder;
  MetricsFile file(folder / "m");
  EXPECT_FALSE(file.poll());
  EXPECT_FALSE(file.exists());
  write_text(folder / "m", line_of(1, 9) + "{\"step\":2,\"lo");
  EXPECT_TRUE(file.poll());
  EXPECT_TRUE(file.exists());
  EXPECT_THAT(steps_of(file.metrics()), ElementsAre(1));
  EXPECT_FALSE(file.poll());
  append(folder / "m", "ss\":8}\n");
  EXPECT_TRUE(file.poll());
  EXPECT_THAT(steps_of(file.metrics()), ElementsAre(1, 2));
  EXPECT_THAT(values_of(file.metrics(), "loss"), ElementsAre(9, 8));
}

TEST(MetricsFile, LeavesAnUnfinishedLastLineOut) {
  TempFolder folder;
  write_text(folder / "half", line_of(1, 9) + "{\"step\":2,\"loss\":8");
  EXPECT_THAT(steps_of(read_metrics(folder / "half").metrics()), ElementsAre(1));
  write_text(folder / "whole", line_of(1, 9) + "{\"step\":2,\"loss\":8}");
  EXPECT_THAT(steps_of(read_metrics(folder / "whole").metrics()), ElementsAre(1, 2));
}

TEST(MetricsFile, StepsThatComeAgainTakeThePlaceOfTheFirst) {
  TempFolder folder;
  write_text(folder / "m", line_of(1, 9) + line_of(2, 8) + line_of(3, 7) + line_of(2, 5) + line_of(3, 4));
  const MetricsFile file = read_metrics(folder / "m");
  EXPECT_THAT(steps_of(file.metrics()), ElementsAre(1, 2, 3));
  EXPECT_THAT(values_of(file.metrics(), "loss"), ElementsAre(9, 5, 4));
  EXPECT_EQ(file.metrics().restarts(), 1);
}

TEST(MetricsFile, BeginsAgainWithAFileThatWasReplacedOrCut) {
  TempFolder folder;
  write_text(folder / "m", line_of(1, 9) + line_of(2, 8) + line_of(3, 7));
  MetricsFile file(folder / "m");
  EXPECT_TRUE(file.poll());
  // As MetricsWriter replaces the file of a run that goes on, here by one of the same length.
  write_text(folder / "new", line_of(1, 9) + line_of(2, 8) + line_of(3, 6));
  std::filesystem::rename(folder / "new", folder / "m");
  EXPECT_TRUE(file.poll());
  EXPECT_THAT(values_of(file.metrics(), "loss"), ElementsAre(9, 8, 6));
  // The replaced one may even end like the one before.
  std::string same_end;
  for (int step = 2; step <= 30; ++step) same_end += line_of(step, 5);
  write_text(folder / "m", line_of(1, 9) + same_end);
  EXPECT_TRUE(file.poll());
  write_text(folder / "new", line_of(1, 8) + same_end);
  std::filesystem::rename(folder / "new", folder / "m");
  EXPECT_TRUE(file.poll());
  EXPECT_EQ(file.metrics().of("loss").front().value, 8);
  // As a run that begins anew cuts it: shorter, and longer than it was before anybody looks.
  write_text(folder / "m", line_of(1, 5));
  EXPECT_TRUE(file.poll());
  EXPECT_THAT(values_of(file.metrics(), "loss"), ElementsAre(5));
  write_text(folder / "m", line_of(1, 4) + line_of(2, 3));
  EXPECT_TRUE(file.poll());
  EXPECT_THAT(values_of(file.metrics(), "loss"), ElementsAre(4, 3));
  std::filesystem::remove(folder / "m");
  EXPECT_TRUE(file.poll());
  EXPECT_FALSE(file.exists());
  EXPECT_FALSE(file.poll());
}

TEST(MetricsFile, OfALargeFileReadsSomeObjectsAndAllNumbersOfLines) {
  TempFolder folder;
  std::string text;
  for (int step = 1; step <= 100; ++step)
    text +=
        cat("{\"step\":", step, ",\"loss\":1,\"objective\":{\"a\":1},\"mem\":{\"host_peak\":5},\"io\":{}}\n");
  write_text(folder / "m", text);
  MetricsFile file(folder / "m", static_cast<std::int64_t>(text.size()) / 10 + 1);
  file.poll();
  EXPECT_EQ(file.metrics().of("loss").size(), 100u);
  EXPECT_EQ(file.metrics().of("objective.a").size(), 100u);
  EXPECT_EQ(file.metrics().of("mem.host_peak").size(), 10u);
}

TEST(MetricsFile, SaysWhatIsWrong) {
  TempFolder folder;
  expect_error(ErrorKind::io, "No such file", [&] { read_metrics(folder / "none"); });
  for (const char* bad : {"hello", "{\"step\":\"x\"}", "{\"loss\":1}", "[1]", "5", "",
                          "{\"step\":1,\"mem\":{}", "{\"step\":-1}"}) {
    write_text(folder / "bad", line_of(1, 1) + bad + "\n" + line_of(2, 1));
    expect_error(ErrorKind::data, "line 2", [&] { read_metrics(folder / "bad"); });
  }
  expect_error(ErrorKind::io, "directory", [&] { read_metrics(folder.path()); });
}

}  // namespace
}  // namespace sherd::cli

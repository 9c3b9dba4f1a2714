#include "cli/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::cli {
namespace {

using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(NiceTicks, AreRoundAndInside) {
  EXPECT_THAT(nice_ticks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(nice_ticks(2.93, 9.21, 7), ElementsAre(3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(nice_ticks(-0.11, 0.12, 4), ElementsAre(DoubleNear(-0.1, 1e-12), 0, DoubleNear(0.1, 1e-12)));
  EXPECT_THAT(nice_ticks(1, 1, 5), ElementsAre());
}

TEST(LossCurve, ReadsWhatIsThere) {
  TempFolder folder;
  write_text(folder / "m.jsonl",
             "{\"step\":1,\"loss\":9.5}\n{\"step\":2,\"loss\":null}\n{\"step\":3,\"loss\":8.5,\"val_loss\":8."
             "75}\n{\"step\":4,");
  const LossCurve curve = read_loss_curve(folder / "m.jsonl");
  ASSERT_EQ(curve.train.size(), 2u);
  EXPECT_EQ(curve.train[1].step, 3);
  EXPECT_EQ(curve.train[1].loss, 8.5);
  ASSERT_EQ(curve.validation.size(), 1u);
  EXPECT_EQ(curve.validation[0].loss, 8.75);
}

TEST(LossCurve, SaysWhatIsWrong) {
  TempFolder folder;
  expect_error(ErrorKind::io, "No such file", [&] { read_loss_curve(folder / "none"); });
  write_text(folder / "other", "{\"step\":1,\"loss\":1}\nhello\n{\"step\":2,\"loss\":1}\n");
  expect_error(ErrorKind::data, "line 2", [&] { read_loss_curve(folder / "other"); });
  write_text(folder / "empty", "");
  expect_error(ErrorKind::data, "no loss", [&] { read_loss_curve(folder / "empty"); });
}

TEST(LossPlot, ShowsEveryCurve) {
  LossCurve curve;
  for (int step = 1; step <= 100; ++step) curve.train.push_back({double(step), 10.0 - step * 0.05});
  curve.validation = {{50, 7.6}, {100, 5.2}};
  const std::string svg = loss_plot(curve, {.title = "a < b & c", .unigram_entropy = 6.81});
  EXPECT_THAT(svg, HasSubstr("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, HasSubstr("unigram entropy 6.81"));
  EXPECT_THAT(svg, HasSubstr("validation 5.20"));
  EXPECT_THAT(svg, HasSubstr("stroke-dasharray"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  const std::string plain = loss_plot({.train = {{1, 2}}, .validation = {}});
  EXPECT_THAT(plain, Not(HasSubstr("validation")));
  EXPECT_THAT(plain, Not(HasSubstr("entropy")));
  EXPECT_THAT(plain, Not(HasSubstr("nan")));  // one step has no extent in either direction
  EXPECT_THAT(plain, Not(HasSubstr("inf")));
}

TEST(LossPlot, StaysSmallForLongRuns) {
  LossCurve curve;
  for (int step = 1; step <= 200'000; ++step) curve.train.push_back({double(step), 3.0 + (step % 7)});
  EXPECT_LT(loss_plot(curve).size(), 150'000u);
}

TEST(PlotMetrics, WritesTheFile) {
  TempFolder folder;
  write_text(folder / "m.jsonl", "{\"step\":1,\"loss\":9.5}\n{\"step\":2,\"loss\":9.0}\n");
  plot_metrics(folder / "m.jsonl", folder / "loss.svg");
  EXPECT_THAT(read_text(folder / "loss.svg"), HasSubstr("</svg>"));
}

}  // namespace
}  // namespace sherd::cli

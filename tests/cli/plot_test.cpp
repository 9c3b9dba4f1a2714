#include "cli/metrics/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/error.h"
#include "cli/metrics/charts.h"
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

/// A run with these losses, from step 1 on, and of validation by step.
Metrics run_of(const std::vector<double>& losses, const std::map<int, double>& validation = {}) {
  Metrics out;
  for (int step = 1; step <= static_cast<int>(losses.size()); ++step) {
    std::vector<std::pair<std::string, double>> values{{"loss", losses[static_cast<std::size_t>(step) - 1]}};
    if (const auto found = validation.find(step); found != validation.end())
      values.emplace_back("val_loss", found->second);
    out.add(step, values);
  }
  return out;
}

TEST(LossPlot, ShowsEveryCurve) {
  std::vector<double> losses;
  for (int step = 1; step <= 100; ++step) losses.push_back(10.0 - step * 0.05);
  const Metrics run = run_of(losses, {{50, 7.6}, {100, 5.2}});
  const std::string svg = loss_plot(run, {.title = "a < b & c", .unigram_entropy = 6.81});
  EXPECT_THAT(svg, HasSubstr("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, HasSubstr("unigram entropy 6.81"));
  EXPECT_THAT(svg, HasSubstr("training 5.00"));
  EXPECT_THAT(svg, HasSubstr("validation 5.20"));
  EXPECT_THAT(svg, HasSubstr("stroke-dasharray"));
  EXPECT_THAT(svg, HasSubstr("stroke-opacity"));  // each step, thin behind the mean
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  const std::string plain = loss_plot(run_of({2}));
  EXPECT_THAT(plain, Not(HasSubstr("validation")));
  EXPECT_THAT(plain, Not(HasSubstr("entropy")));
  EXPECT_THAT(plain, Not(HasSubstr("nan")));  // one step has no extent in either direction
  EXPECT_THAT(plain, Not(HasSubstr("inf")));
  expect_error(ErrorKind::data, "no loss", [] { loss_plot({}); });
}

TEST(LossPlot, ShowsRewardsBelow) {
  Metrics run;
  for (int step = 1; step <= 3; ++step)
    run.add(step, {{"loss", 0.7},
                   {"objective.rewards/chosen", 0.1 * step},
                   {"objective.rewards/margins", 0.5 * step},
                   {"objective.rewards/accuracies", 0.75}});
  const std::string svg = loss_plot(run);
  EXPECT_THAT(svg, HasSubstr("viewBox=\"0 0 960 1080\""));
  EXPECT_THAT(svg, HasSubstr("y=\"540.00\""));
  for (const char* text : {">Rewards<", "chosen 0.30", "margin 1.50", "accuracy 0.75", ">loss<"})
    EXPECT_THAT(svg, HasSubstr(text));
  EXPECT_THAT(svg, Not(HasSubstr("rejected")));
}

TEST(LossPlot, StaysSmallForLongRuns) {
  std::vector<double> losses;
  std::map<int, double> evaluated;
  for (int step = 1; step <= 200'000; ++step)
    losses.push_back(3.0 + (step % 7)), evaluated.emplace_hint(evaluated.end(), step, 3.0);
  EXPECT_LT(loss_plot(run_of(losses, evaluated)).size(), 350'000u);
}

/// The y of a picture of one curve at its first and last point.
std::pair<double, double> ends_of(const std::string& svg) {
  const auto begin = svg.find("points=\"") + 8;
  const std::string points = svg.substr(begin, svg.find('"', begin) - begin);
  return {std::stod(points.substr(points.find(',') + 1)), std::stod(points.substr(points.rfind(',') + 1))};
}

TEST(Picture, PutsPointsWhereTheAxesSay) {
  const std::vector<Point> points{{0, 1}, {10, 100}};
  Chart chart{.id = "x", .title = "x", .y_label = "y"};
  chart.curves = {{.name = "x", .points = points}};
  // 48 above, 56 below, and a twentieth of the range beyond the lowest and highest value.
  const auto [first, last] = ends_of(draw(chart));
  EXPECT_NEAR(first, 540 - 56 - 436 * 0.05 / 1.1, 0.01);
  EXPECT_NEAR(last, 48 + 436 * 0.05 / 1.1, 0.01);
  chart.logarithmic = true;
  const std::vector<Point> three{{0, 1}, {5, 10}, {10, 100}};
  chart.curves[0].points = three;
  const std::string svg = draw(chart);
  const auto [low, high] = ends_of(svg);
  EXPECT_THAT(svg, HasSubstr(cat(",", "266.00 ")));  // 10 is halfway from 1 to 100
  EXPECT_NEAR(low + high, 2 * 266, 0.02);
  EXPECT_THAT(svg, HasSubstr(">50</text>"));
}

TEST(Picture, TellsValuesInTheirUnits) {
  EXPECT_EQ(shown(2.345), "2.35");
  EXPECT_EQ(shown(0.000321), "0.000321");
  EXPECT_EQ(shown(0), "0.00");
  EXPECT_EQ(shown(1.5 * (1 << 30), ValueUnit::bytes), "1.50 GiB");
  EXPECT_EQ(shown(12'345, ValueUnit::count), "12.3k");
  EXPECT_EQ(shown(250, ValueUnit::milliseconds), "250 ms");
  EXPECT_EQ(shown(2500, ValueUnit::milliseconds), "2.5 s");
  EXPECT_EQ(shown(0.812, ValueUnit::share), "81.2%");
  const std::vector<Point> points{{1, 0}, {2, 3.0 * (1 << 30)}};
  Chart chart{.id = "m", .title = "m", .y_label = "peak"};
  chart.unit = ValueUnit::bytes, chart.curves = {{.name = "device", .points = points}};
  const std::string svg = draw(chart);
  EXPECT_THAT(svg, HasSubstr(">peak (GiB)<"));
  EXPECT_THAT(svg, HasSubstr(">3.0<"));
  EXPECT_THAT(svg, HasSubstr("device 3.00 GiB"));
}

TEST(Picture, ComparesWhatWasPredicted) {
  const std::string svg = comparison_plot({{1, 2, "a \"quoted\" <name>"}, {4, 3, "b"}}, "Steps");
  EXPECT_THAT(svg, HasSubstr("<title>a &quot;quoted&quot; &lt;name&gt;</title>"));
  EXPECT_THAT(svg, HasSubstr(">both the same<"));
  EXPECT_THAT(svg, HasSubstr(">measured seconds<"));
  expect_error(ErrorKind::data, "nothing to compare", [] { comparison_plot({}, "Steps"); });
}

TEST(PlotMetrics, WritesTheFile) {
  TempFolder folder;
  write_text(folder / "m.jsonl", "{\"step\":1,\"loss\":9.5}\n{\"step\":2,\"loss\":9.0}\n");
  plot_metrics(folder / "m.jsonl", folder / "loss.svg");
  EXPECT_THAT(read_text(folder / "loss.svg"), HasSubstr("</svg>"));
  write_text(folder / "empty", "{\"step\":1,\"loss\":null}\n");
  expect_error(ErrorKind::data, "no loss", [&] { plot_metrics(folder / "empty", folder / "no.svg"); });
}

}  // namespace
}  // namespace sherd::cli

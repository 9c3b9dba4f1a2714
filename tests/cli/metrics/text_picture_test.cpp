#include "cli/metrics/text_picture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/error.h"
#include "base/text/utf8.h"

namespace sherd::cli {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr TextStyle ascii{.utf8 = false, .color = false}, braille{.utf8 = true, .color = false};

std::string joined(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + '\n';
  return out;
}

/// Columns that a line takes on a terminal.
int columns_of(std::string_view line) {
  int columns = 0;
  while (!line.empty()) {
    if (line.starts_with("\x1b[")) {
      line.remove_prefix(line.find('m') + 1);
      continue;
    }
    line.remove_prefix(utf8_length(line));
    ++columns;
  }
  return columns;
}

/// A run that learns preferences, of so many steps.
Metrics preferences(int steps) {
  Metrics out;
  for (int step = 1; step <= steps; ++step)
    out.add(step, {{"loss", 1.0 / step},
                   {"grad_norm", 2},
                   {"tokens_per_s", 12'000},
                   {"step_ms", 250},
                   {"mem.device_peak", 3e9},
                   {"objective.rewards/chosen", 0.1 * step},
                   {"objective.rewards/rejected", -0.1 * step},
                   {"objective.rewards/margins", 0.2 * step},
                   {"objective.rewards/accuracies", 0.75}});
  out.add(steps + 1, {{"loss", 0.125}, {"val_loss", 0.5}});
  return out;
}

TEST(TextPicture, DrawsInPlainCharacters) {
  const std::vector<Point> falling{{1, 4}, {2, 3}, {3, 2}, {4, 1}}, other{{1, 1}, {4, 4}};
  Chart chart{.id = "loss", .title = "Loss", .y_label = ""};
  chart.curves = {{.name = "training", .points = falling}, {.name = "validation", .points = other}};
  EXPECT_THAT(
      draw_as_text(chart, 40, 6, ascii),
      ElementsAre("Loss  * training 1.00  o validation 4.00", "4.00|**********                        o",
                  "    |         **********                ", "    |                  **********       ",
                  "1.00|o                           *******", "step 1                                 4"))
      << joined(draw_as_text(chart, 40, 6, ascii));
}

TEST(TextPicture, DrawsInBrailleWhereTheLocaleHasIt) {
  const std::vector<Point> rising{{1, 0}, {2, 1}};
  Chart chart{.id = "x", .title = "X", .y_label = ""};
  chart.curves = {{.name = "x", .points = rising}};
  // Three characters of two dots by two of four: a line from the lower left to the upper right.
  EXPECT_THAT(draw_as_text(chart, 8, 4, braille), ElementsAre(_, "1.00│ ⡠⠊", "0.00│⡔⠁ ", _));
  const std::vector<Point> level{{1, 5}};
  chart.curves = {{.name = "x", .points = level}};
  EXPECT_THAT(joined(draw_as_text(chart, 8, 3, braille)), HasSubstr("step 1"));
}

TEST(TextPicture, DrawsTheMeanOfMoreStepsThanItHasDots) {
  std::vector<Point> noisy;
  for (int step = 1; step <= 10'000; ++step) noisy.push_back({double(step), step % 2 ? 1.0 : 3.0});
  Chart chart{.id = "x", .title = "X", .y_label = ""};
  chart.curves = {{.name = "x", .points = noisy}};
  const std::string drawn = joined(draw_as_text(chart, 40, 10, ascii));
  EXPECT_THAT(drawn, Not(HasSubstr("3.00|")));
  EXPECT_THAT(drawn, AllOf(HasSubstr("2.01|"), HasSubstr("1.99|"))) << "means of some 120 steps each";
}

TEST(TextPicture, NeverLeavesItsLinesAndColumns) {
  const Metrics metrics = preferences(300);
  for (const TextStyle& style : {ascii, braille, TextStyle{true, true}})
    for (const int width : {1, 7, 20, 37, 38, 80, 81, 200, 400})
      for (const int height : {1, 2, 5, 8, 13, 24, 60, 100}) {
        const auto lines = overview_as_text(metrics, "metrics.jsonl  step 301", width, height, style);
        EXPECT_LE(lines.size(), static_cast<std::size_t>(height));
        for (const std::string& line : lines) EXPECT_LE(columns_of(line), width) << line;
      }
}

TEST(TextPicture, ShowsAllThatThereIsRoomFor) {
  const std::string large = joined(overview_as_text(preferences(20), "run", 120, 40, ascii));
  for (const char* text : {"run", "Loss  * training 0.12  o validation 0.50", "Rewards", "margin 4.00",
                           "Pairs with a margin above 0  75%", "Tokens per second  12.0k",
                           "Time of a step  250 ms", "Gradient norm  2.00", "Memory of rank 0  2.79 GiB"})
    EXPECT_THAT(large, HasSubstr(text));
  EXPECT_EQ(static_cast<int>(std::count(large.begin(), large.end(), '|')) > 20, true);
  // Little room: a picture of the losses, and lines of the rest.
  const std::string small = joined(overview_as_text(preferences(20), "run", 60, 14, ascii));
  EXPECT_THAT(small, HasSubstr("Loss  * training 0.12"));
  EXPECT_THAT(small, HasSubstr("\nGradient norm  2.00\n"));
  EXPECT_THAT(small, HasSubstr("\nstep 1"));  // below the axis, which has five lines
  EXPECT_EQ(std::count(small.begin(), small.end(), '|'), 5);
  Metrics plain;
  plain.add(1, {{"loss", 2}});
  EXPECT_THAT(joined(overview_as_text(plain, "run", 80, 24, ascii)), Not(HasSubstr("Rewards")));
}

TEST(TextPicture, HasColoursOnlyWhereTheyAreWanted) {
  EXPECT_THAT(joined(overview_as_text(preferences(5), "run", 100, 40, ascii)), Not(HasSubstr("\x1b")));
  EXPECT_THAT(joined(overview_as_text(preferences(5), "run", 100, 40, {true, true})), HasSubstr("\x1b["));
}

TEST(TextPicture, ShowsNoCodesThatANameHolds) {
  Metrics metrics;
  metrics.add(1, {{"loss", 2}});
  const auto lines = overview_as_text(metrics, "evil\x1b[2J\xff\xc2\x9b", 80, 24, ascii);
  EXPECT_EQ(lines[0], "evil?[2J??");
}

TEST(TextStyle, FollowsTheEnvironment) {
  const auto style = [](const char* all, const char* type, const char* lang) {
    for (const auto& [name, value] : {std::pair("LC_ALL", all), {"LC_CTYPE", type}, {"LANG", lang}})
      value ? ::setenv(name, value, 1) : ::unsetenv(name);
    return style_of_environment(-1).utf8;
  };
  EXPECT_TRUE(style(nullptr, nullptr, "en_US.UTF-8"));
  EXPECT_TRUE(style("", "C.utf8", "C"));
  EXPECT_FALSE(style("C", "en_US.UTF-8", "en_US.UTF-8"));
  EXPECT_FALSE(style(nullptr, nullptr, nullptr));
  EXPECT_FALSE(style(nullptr, nullptr, "de_DE.ISO-8859-1"));
}

}  // namespace
}  // namespace sherd::cli

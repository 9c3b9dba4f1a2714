#pragma once

#include <string>
#include <vector>

#include "cli/metrics/charts.h"

namespace sherd::cli {

/// How a terminal or a pipe wants its text.
struct TextStyle {
  bool utf8 = true;    ///< braille for curves; false: ASCII alone
  bool color = false;  ///< the terminal's own colours, by escape codes
};

/// UTF-8 where the environment's locale (LC_ALL, LC_CTYPE, LANG) has it, and colours where `descriptor` shows
/// them.
TextStyle style_of_environment(int descriptor);

/// A chart as `height` lines, each `width` columns wide at most: title and last values, curves between the
/// lowest and highest value, the steps below. The first curve is drawn as a line, others as marks.
std::vector<std::string> draw_as_text(const Chart& chart, int width, int height, const TextStyle& style);

/// The losses, rates, gradient norm and memory of a run in `height` lines of `width` columns at most,
/// `heading` in front; of small pictures those that are looked at first.
std::vector<std::string> overview_as_text(const Metrics& metrics, const std::string& heading, int width,
                                          int height, const TextStyle& style);

}  // namespace sherd::cli

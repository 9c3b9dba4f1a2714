#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/metrics/metrics_file.h"

namespace sherd::cli {

enum class ValueUnit { plain, bytes, count, milliseconds, share };

/// A value with a unit as people read it: "2.35", "1.50 GiB", "12.3k", "250 ms", "81.2%".
std::string shown(double value, ValueUnit unit = ValueUnit::plain);

/// One curve of a chart.
struct Curve {
  std::string name;  ///< in the legend; empty: it has no entry there
  std::span<const Point> points;
  enum class Style {
    steps,   ///< every step, thin, with a moving average where there are many
    dotted,  ///< a line with a dot at each point
    dashed,  ///< a dashed line
    apart    ///< dots alone
  } style = Style::steps;
  int color = 0;                      ///< of the six that there are
  bool with_last = true;              ///< the legend tells the last value
  std::vector<std::string> labels{};  ///< of each point, told where a reader points at it; empty: none
};

/// A picture of curves over one pair of axes.
struct Chart {
  std::string id, title, y_label;
  std::string x_label = "optimizer step";
  std::vector<Curve> curves{};
  ValueUnit unit = ValueUnit::plain;
  std::vector<std::string> remarks{};  ///< entries of the legend that have no curve
  bool whole_x = true;                 ///< x has whole numbers alone
  bool logarithmic = false;            ///< y, where all values are positive and far apart
  bool from_zero = false;              ///< both axes begin at 0
  bool legend_above = false;           ///< else in a corner of the axes
  bool legend_left = false;            ///< the upper left one; else the upper right one
  double width = 960, height = 540;
};

/// Multiples of 1, 2 or 5 times a power of ten that lie in [low, high], about `count` of them.
std::vector<double> nice_ticks(double low, double high, int count);

/// Text as HTML and SVG have it, also between double quotes.
std::string escaped_html(std::string_view text);

/// A self-contained SVG element, of which a stylesheet can change the colours by classes: ground, grid, axis,
/// box, and c0 to c5 of lines, f0 to f5 of dots. Curves are thinned to what its pixels can show. A script
/// finds the ranges of the axes in data-frame, and the curves by their data-name.
std::string draw(const Chart& chart);
/// Charts below each other as one SVG element.
std::string draw_below_each_other(const std::vector<Chart>& charts);

}  // namespace sherd::cli

#include "cli/metrics/text_picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/error.h"
#include "base/terminal.h"
#include "base/text/utf8.h"

namespace sherd::cli {
namespace {

constexpr int dots_wide = 2, dots_high = 4;  // of a braille character

/// A line of text that knows its columns. Bytes that are no text, and characters that move the cursor, are
/// question marks.
class Row {
 public:
  explicit Row(int width) : width_(width) {}
  void add(std::string_view text) {
    while (!text.empty() && columns_ < width_) {
      const std::size_t length = utf8_length(text);
      const auto byte = static_cast<unsigned char>(text[0]);
      const bool shown = length > 0 && byte >= 0x20 && byte != 0x7F &&
                         !(byte == 0xC2 && length == 2 && (text[1] & 0xE0) == 0x80);
      shown ? text_ += text.substr(0, length) : text_ += '?';
      text.remove_prefix(std::max<std::size_t>(1, length));
      ++columns_;
    }
  }
  void add(std::string_view text, const char* color) {
    if (color) text_ += color;
    add(text);
    if (color) text_ += "\x1b[0m";
  }
  void fill_to(int columns) {
    if (columns > columns_) add(std::string(static_cast<std::size_t>(columns - columns_), ' '));
  }
  int columns() const { return columns_; }
  const std::string& text() const { return text_; }

 private:
  int width_, columns_ = 0;
  std::string text_;
};

const char* color_of(int curve, const TextStyle& style) {
  static constexpr const char* colors[] = {"\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m"};
  return style.color ? colors[static_cast<std::size_t>(curve) % std::size(colors)] : nullptr;
}

/// The character that marks a curve's points, and its name in the legend.
std::string mark_of(std::size_t curve, const TextStyle& style) {
  static constexpr const char* marks[2][4] = {{"*", "o", "+", "x"}, {"━", "●", "+", "x"}};
  return marks[style.utf8][std::min<std::size_t>(curve, 3)];
}

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void include(double value) { low = std::min(low, value), high = std::max(high, value); }
  /// From 0 to 1 within it; in the middle of an empty one.
  double place(double value) const { return high > low ? (value - low) / (high - low) : 0.5; }
};

/// The mean of the points in each of `columns` equal parts of the steps, so that a curve with more steps than
/// dots is a line and no band.
std::vector<Point> column_means(std::span<const Point> points, const Range& x, int columns) {
  std::vector<Point> out;
  int last = -1;
  double count = 0;
  for (const Point& point : points) {
    const int column = static_cast<int>(std::lround(x.place(point.step) * (columns - 1)));
    if (column != last) out.push_back({point.step, 0}), last = column, count = 0;
    ++count;
    out.back().value += (point.value - out.back().value) / count;
  }
  return out;
}

/// The characters between the axes, and which curve each belongs to.
class Canvas {
 public:
  Canvas(int width, int height, const TextStyle& style) : width_(width), height_(height), style_(style) {
    cells_.resize(static_cast<std::size_t>(width * height));
  }

  void line(std::span<const Point> points, const Range& x, const Range& y) {
    const int columns = width_ * dots_wide, rows = height_ * dots_high;
    int old_x = -1, old_y = 0;
    for (const Point& point : points) {
      const int at_x = static_cast<int>(std::lround(x.place(point.step) * (columns - 1)));
      const int at_y = static_cast<int>(std::lround((1 - y.place(point.value)) * (rows - 1)));
      if (old_x < 0) old_x = at_x, old_y = at_y;
      const int length = std::max({1, std::abs(at_x - old_x), std::abs(at_y - old_y)});
      for (int i = 0; i <= length; ++i)
        dot(old_x + (at_x - old_x) * i / length, old_y + (at_y - old_y) * i / length);
      old_x = at_x, old_y = at_y;
    }
  }
  void marks(std::span<const Point> points, const Range& x, const Range& y, int curve) {
    for (const Point& point : points)
      cell(static_cast<int>(std::lround(x.place(point.step) * (width_ - 1))),
           static_cast<int>(std::lround((1 - y.place(point.value)) * (height_ - 1))))
          .mark = curve;
  }
  void add_to(Row& row, int line) const {
    for (int column = 0; column < width_; ++column) {
      const Cell& at = cells_[static_cast<std::size_t>(line * width_ + column)];
      if (at.mark > 0)
        row.add(mark_of(static_cast<std::size_t>(at.mark), style_), color_of(at.mark, style_));
      else if (at.dots == 0)
        row.add(" ");
      else
        row.add(style_.utf8 ? braille(at.dots) : "*", color_of(0, style_));
    }
  }

 private:
  struct Cell {
    unsigned dots = 0;
    int mark = 0;  ///< the curve that is marked; 0: none
  };
  Cell& cell(int column, int line) { return cells_[static_cast<std::size_t>(line * width_ + column)]; }
  void dot(int x, int y) {
    // Unicode numbers the dots of a braille character so.
    static constexpr unsigned bits[dots_high][dots_wide] = {
        {0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    cell(x / dots_wide, y / dots_high).dots |= bits[y % dots_high][x % dots_wide];
  }
  static std::string braille(unsigned dots) {
    return {'\xE2', static_cast<char>(0xA0 | dots >> 6), static_cast<char>(0x80 | (dots & 0x3F))};
  }

  int width_, height_;
  TextStyle style_;
  std::vector<Cell> cells_;
};

/// Labels of an axis' ends, right-aligned.
void add_label(Row& row, const std::string& label, int width) {
  row.fill_to(row.columns() + std::max(0, width - static_cast<int>(label.size())));
  row.add(label);
}

/// "  ● validation 2.19" of each curve, its name where there are several.
std::vector<std::string> last_values(const Chart& chart, const TextStyle& style, bool marks) {
  std::vector<std::string> out;
  const bool named = chart.curves.size() > 1;
  for (std::size_t i = 0; i < chart.curves.size(); ++i) {
    const Curve& curve = chart.curves[i];
    out.push_back(cat("  ", marks && named ? mark_of(i, style) + " " : "", named ? curve.name + " " : "",
                      shown(curve.points.back().value, chart.unit)));
  }
  return out;
}

int columns_of(const std::string& text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string text_of_step(double step) {
  return std::to_string(static_cast<std::int64_t>(step));
}

/// The charts that a terminal shows, the first ones in front.
std::vector<const Chart*> shown_of(const std::vector<Chart>& charts) {
  std::vector<const Chart*> out;
  for (const char* id : {"loss", "rewards", "accuracy", "rate", "time", "norm", "memory"})
    if (const Chart* chart = find_chart(charts, id)) out.push_back(chart);
  return out;
}

}  // namespace

TextStyle style_of_environment(int descriptor) {
  return {locale_is_utf8(), descriptor >= 0 && shows_colours(descriptor)};
}

std::vector<std::string> draw_as_text(const Chart& chart, int width, int height, const TextStyle& style) {
  Range x, y;
  std::vector<std::vector<Point>> curves;
  for (const Curve& curve : chart.curves)
    x.include(curve.points.front().step), x.include(curve.points.back().step);
  for (const Curve& curve : chart.curves) {
    curves.push_back(column_means(curve.points, x, width * (curves.empty() ? dots_wide : 1)));
    for (const Point& point : curves.back()) y.include(point.value);
  }
  const std::string high = shown(y.high, chart.unit), low = shown(y.low, chart.unit);
  const int label = static_cast<int>(std::max(high.size(), low.size()));
  std::vector<std::string> out;
  Row title(width);
  title.add(chart.title, style.color ? "\x1b[1m" : nullptr);
  for (const std::string& value : last_values(chart, style, true))
    if (title.columns() + columns_of(value) <= width) title.add(value);
  title.fill_to(width);
  out.push_back(title.text());
  const int wide = std::max(1, width - label - 1), high_lines = std::max(1, height - 2);
  Canvas canvas(wide, high_lines, style);
  for (std::size_t i = 0; i < curves.size(); ++i)
    if (i == 0)
      canvas.line(curves[i], x, y);
    else
      canvas.marks(curves[i], x, y, static_cast<int>(i));
  for (int line = 0; line < high_lines; ++line) {
    Row row(width);
    add_label(row, line == 0 ? high : line + 1 == high_lines ? low : "", label);
    row.add(style.utf8 ? "│" : "|");
    canvas.add_to(row, line);
    row.fill_to(width);
    out.push_back(row.text());
  }
  Row steps(width);
  add_label(steps, "step ", label + 1);
  const std::string first = text_of_step(x.low), last = text_of_step(x.high);
  steps.add(first);
  if (last != first) add_label(steps, last, width - steps.columns());
  steps.fill_to(width);
  out.push_back(steps.text());
  return out;
}

std::vector<std::string> overview_as_text(const Metrics& metrics, const std::string& heading, int width,
                                          int height, const TextStyle& style) {
  constexpr int narrowest = 42, lowest = 6, gap = 2;
  std::vector<std::string> out;
  Row first(width);
  first.add(heading, style.color ? "\x1b[1m" : nullptr);
  out.push_back(first.text());
  const std::vector<Chart> charts = charts_of(metrics);
  std::vector<const Chart*> seen = shown_of(charts);
  if (seen.empty()) return out;
  const int columns = std::clamp((width + gap) / (narrowest + gap), 1, 3);
  // A chart that has no room as a picture has a line of its last values.
  const auto rows_of = [&](std::size_t pictures) {
    return (static_cast<int>(pictures) + columns - 1) / columns;
  };
  std::size_t pictures = seen.size();
  const auto room = [&] { return height - 1 - static_cast<int>(seen.size() - pictures); };
  while (pictures > 0 && room() < rows_of(pictures) * lowest) --pictures;
  const int used = pictures == 0 ? columns : std::min<int>(columns, static_cast<int>(pictures));
  const int each_width = (width + gap) / used - gap;
  const int each_height = pictures == 0 ? 0 : room() / rows_of(pictures);
  for (std::size_t begin = 0; begin < pictures; begin += static_cast<std::size_t>(used)) {
    std::vector<std::string> lines(static_cast<std::size_t>(each_height));
    for (std::size_t i = begin; i < std::min(pictures, begin + static_cast<std::size_t>(used)); ++i) {
      const std::vector<std::string> drawn = draw_as_text(*seen[i], each_width, each_height, style);
      for (std::size_t line = 0; line < lines.size(); ++line)
        lines[line] += (i == begin ? "" : std::string(gap, ' ')) + drawn[line];
    }
    for (std::string& line : lines) {
      line.erase(line.find_last_not_of(' ') + 1);
      out.push_back(std::move(line));
    }
  }
  for (std::size_t i = pictures; i < seen.size() && static_cast<int>(out.size()) < height; ++i) {
    Row row(width);
    row.add(seen[i]->title);
    for (const std::string& value : last_values(*seen[i], style, false)) row.add(value);
    out.push_back(row.text());
  }
  return out;
}

}  // namespace sherd::cli

#include "cli/metrics/picture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/error.h"
#include "base/text/utf8.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

using Points = std::vector<Point>;
using Seen = std::span<const Point>;

constexpr double left = 72, right = 24, bottom = 56, letter = 7.6, legend_row = 22;
constexpr const char* colors[] = {"#4477aa", "#cc3311", "#228833", "#aa3377", "#997700", "#117788"};

std::string number(double value, const char* format = "%.2f") {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

const char* color_of(const Curve& curve) {
  return colors[static_cast<std::size_t>(curve.color) % std::size(colors)];
}

/// Values are divided by this for their labels, which then have this unit.
struct Scale {
  double divisor = 1;
  std::string name;

  static Scale of(ValueUnit unit, double most) {
    if (unit == ValueUnit::share) return {0.01, "%"};
    if (unit == ValueUnit::milliseconds) return most < 2e3 ? Scale{1, "ms"} : Scale{1e3, "seconds"};
    const double power = unit == ValueUnit::bytes ? 1024 : 1000;
    if (unit != ValueUnit::bytes && unit != ValueUnit::count) return {};
    static constexpr const char* bytes[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
    static constexpr const char* counts[] = {"", "thousands", "millions", "billions", "trillions", "10^15"};
    std::size_t step = 0;
    double divisor = 1;
    for (; most / divisor >= power && step + 1 < std::size(bytes); ++step) divisor *= power;
    return {divisor, unit == ValueUnit::bytes ? bytes[step] : counts[step]};
  }
};

/// The data's ranges, and where they fall on the picture.
struct Frame {
  double x_low = 0, x_high = 1, y_low = 0, y_high = 1;
  double width = 960, height = 540, top = 48;
  bool logarithmic = false;

  double x(double step) const { return left + (step - x_low) / (x_high - x_low) * (width - left - right); }
  double y(double value) const {
    const auto at = [this](double v) { return logarithmic ? std::log10(v) : v; };
    return height - bottom - (at(value) - at(y_low)) / (at(y_high) - at(y_low)) * (height - top - bottom);
  }
};

struct LegendEntry {
  std::string text, style, kind;
};

double width_of(const LegendEntry& entry) {
  std::size_t letters = 0;
  for (const char c : entry.text) letters += (c & 0xC0) != 0x80;
  return 60 + letter * static_cast<double>(letters);
}

/// The rows into which a legend above the axes is broken.
std::size_t rows_above(const std::vector<LegendEntry>& entries, double width) {
  double x = left;
  std::size_t rows = entries.empty() ? 0 : 1;
  for (const LegendEntry& entry : entries) {
    if (x > left && x + width_of(entry) > width) ++rows, x = left;
    x += width_of(entry);
  }
  return rows;
}

Frame frame_of(const Chart& chart, std::size_t rows) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  Frame out{infinite, -infinite, infinite, -infinite, chart.width, chart.height};
  out.top = 48 + (chart.legend_above ? legend_row * static_cast<double>(rows) - 6 : 0);
  for (const Curve& curve : chart.curves)
    for (const Point& point : curve.points) {
      out.x_low = std::min(out.x_low, point.step), out.x_high = std::max(out.x_high, point.step);
      out.y_low = std::min(out.y_low, point.value), out.y_high = std::max(out.y_high, point.value);
    }
  if (out.x_low > out.x_high) out.x_low = 0, out.x_high = 1, out.y_low = 0, out.y_high = 1;
  if (chart.from_zero) {
    const double most = std::max(out.x_high, out.y_high);
    out.x_low = out.y_low = 0, out.x_high = out.y_high = most > 0 ? most : 1;
    return out;
  }
  if (out.x_high <= out.x_low) out.x_low -= 1, out.x_high += 1;
  out.logarithmic = chart.logarithmic && out.y_low > 0 && out.y_high / out.y_low > 30;
  if (out.logarithmic) {
    const double margin = std::pow(out.y_high / out.y_low, 0.05);
    out.y_low /= margin, out.y_high *= margin;
    return out;
  }
  const double range = out.y_high - out.y_low, size = std::abs(out.y_high);
  const double margin = range > 1e-9 * size ? 0.05 * range : size > 0 ? 0.05 * size : 1;
  const bool all_positive = out.y_low >= 0;
  out.y_low -= margin, out.y_high += margin;
  if (all_positive && chart.unit != ValueUnit::plain) out.y_low = std::max(out.y_low, 0.0);
  if (chart.unit == ValueUnit::bytes) out.y_low = 0;
  return out;
}

/// The lowest and the highest point of every pixel column, in the order of their steps.
Points thinned(Seen points, const Frame& frame) {
  Points out;
  for (std::size_t i = 0; i < points.size();) {
    const double column = std::floor(frame.x(points[i].step));
    std::size_t low = i, high = i;
    for (; i < points.size() && std::floor(frame.x(points[i].step)) == column; ++i) {
      if (points[i].value < points[low].value) low = i;
      if (points[i].value > points[high].value) high = i;
    }
    out.push_back(points[std::min(low, high)]);
    if (low != high) out.push_back(points[std::max(low, high)]);
  }
  return out;
}

/// The mean over a window of a fiftieth of the curve around each point; narrower near the ends, where it
/// stays symmetric so as not to lag, and none for the last points, whose windows would hold next to nothing.
Points smoothed(Seen points) {
  const std::size_t reach = std::max<std::size_t>(1, points.size() / 100);
  std::vector<double> sums{0};
  for (const Point& point : points) sums.push_back(sums.back() + point.value);
  Points out;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t half = std::min({reach, i, points.size() - 1 - i});
    if (i >= reach && half < (reach + 1) / 2) break;
    out.push_back(
        {points[i].step, (sums[i + half + 1] - sums[i - half]) / static_cast<double>(2 * half + 1)});
  }
  return out;
}

std::string line(const Points& points, const Frame& frame, const std::string& style,
                 const std::string& name = "") {
  std::string out = "<polyline fill=\"none\" stroke-linejoin=\"round\" " + style;
  if (!name.empty()) out += cat(" data-name=\"", escaped_html(name), '"');
  out += " points=\"";
  for (const Point& point : points)
    out += number(frame.x(point.step)) + ',' + number(frame.y(point.value)) + ' ';
  return out + "\"/>\n";
}

std::string text_at(double x, double y, const std::string& anchor, const std::string& text,
                    const std::string& more = "") {
  return cat("<text x=\"", number(x), "\" y=\"", number(y), "\" text-anchor=\"", anchor, "\"", more, ">",
             escaped_html(text), "</text>\n");
}

/// As many decimals as the ticks' distance needs.
std::string tick_label(double value, double step) {
  const int decimals = step >= 1 ? 0 : static_cast<int>(std::ceil(-std::log10(step) - 1e-9));
  if (decimals > 5 || std::abs(value) >= 1e7) return value == 0 ? "0" : number(value, "%.4g");
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value == 0 ? 0.0 : value);
  return text;
}

/// Values along the vertical axis with their labels.
std::vector<std::pair<double, std::string>> vertical_ticks(const Frame& frame, const Scale& scale) {
  std::vector<std::pair<double, std::string>> out;
  if (!frame.logarithmic) {
    const int count = static_cast<int>((frame.height - frame.top - bottom) / (frame.height < 400 ? 40 : 60));
    const std::vector<double> ticks =
        nice_ticks(frame.y_low / scale.divisor, frame.y_high / scale.divisor, std::max(3, count));
    const double step = ticks.size() > 1 ? ticks[1] - ticks[0] : 1;
    for (const double tick : ticks) out.emplace_back(tick * scale.divisor, tick_label(tick, step));
    return out;
  }
  const bool dense = frame.y_high / frame.y_low < 1e3;
  for (double power = std::floor(std::log10(frame.y_low)); power <= std::log10(frame.y_high); ++power)
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double value = factor * std::pow(10, power);
      if ((factor == 1 || dense) && value >= frame.y_low && value <= frame.y_high)
        out.emplace_back(value, number(value / scale.divisor, "%.3g"));
    }
  return out;
}

std::string rule(double x1, double y1, double x2, double y2, const char* kind, const char* color) {
  return cat("<path class=\"", kind, "\" d=\"M", number(x1), ' ', number(y1), 'L', number(x2), ' ',
             number(y2), "\" stroke=\"", color, "\"/>\n");
}

std::string axes(const Frame& frame, const Chart& chart, const Scale& scale) {
  std::string out;
  const double end = frame.width - right, floor = frame.height - bottom;
  for (const auto& [value, label] : vertical_ticks(frame, scale)) {
    out += rule(left, frame.y(value), end, frame.y(value), "grid", "#e6e6e6");
    out += text_at(left - 8, frame.y(value) + 4, "end", label);
  }
  const std::vector<double> xs =
      nice_ticks(frame.x_low, frame.x_high, std::max(3, static_cast<int>(frame.width / 105)));
  for (const double x : xs) {
    if (chart.whole_x && x != std::floor(x)) continue;
    out += rule(frame.x(x), floor, frame.x(x), floor + 5, "axis", "#333333");
    out += text_at(frame.x(x), floor + 20, "middle", tick_label(x, xs.size() > 1 ? xs[1] - xs[0] : 1.0));
  }
  out += rule(left, floor, end, floor, "axis", "#333333");
  out += rule(left, frame.top, left, floor, "axis", "#333333");
  out += text_at((left + end) / 2, frame.height - 14, "middle", chart.x_label);
  const double middle = (frame.top + floor) / 2;
  std::string name = chart.y_label;
  if (!scale.name.empty()) name += cat(name.empty() ? "" : " (", scale.name, name.empty() ? "" : ")");
  out += text_at(16, middle, "middle", name, cat(" transform=\"rotate(-90 16 ", number(middle), ")\""));
  return out;
}

std::string entry_at(const LegendEntry& entry, double x, double middle) {
  std::string out;
  if (!entry.style.empty())
    out = cat("<path d=\"M", number(x), ' ', number(middle), "h28\" ", entry.style, "/>\n");
  return out + text_at(entry.style.empty() ? x : x + 36, middle + 4, "start", entry.text);
}

std::string legend(const std::vector<LegendEntry>& entries, const Chart& chart) {
  std::string out;
  if (entries.empty()) return out;
  if (chart.legend_above) {
    double x = left, y = 48;
    for (const LegendEntry& entry : entries) {
      if (x > left && x + width_of(entry) > chart.width) x = left, y += legend_row;
      out += entry_at(entry, x, y);
      x += width_of(entry);
    }
    return out;
  }
  double box_width = 0;
  for (const LegendEntry& entry : entries) box_width = std::max(box_width, width_of(entry));
  const double x = chart.legend_left ? left + 16 : chart.width - right - box_width - 8, y = 48 + 6;
  out = cat("<rect class=\"box\" x=\"", number(x), "\" y=\"", number(y), "\" width=\"", number(box_width),
            "\" height=\"", number(legend_row * static_cast<double>(entries.size()) + 10),
            "\" rx=\"4\" fill=\"#ffffff\" fill-opacity=\"0.9\" stroke=\"#cccccc\"/>\n");
  for (std::size_t i = 0; i < entries.size(); ++i)
    out += entry_at(entries[i], x + 10, y + 16 + legend_row * static_cast<double>(i));
  return out;
}

std::string stroke(const Curve& curve, double thickness, const char* more = "") {
  return cat("class=\"c", curve.color, "\" stroke=\"", color_of(curve), "\" stroke-width=\"",
             number(thickness, "%.1f"), "\"", *more ? " " : "", more);
}

constexpr std::size_t enough_to_smooth = 50;

bool is_smoothed(const Curve& curve) {
  return curve.style == Curve::Style::steps && curve.points.size() >= enough_to_smooth;
}

std::string dots(const Curve& curve, const Frame& frame) {
  std::string out;
  const bool all = !curve.labels.empty();
  const Points points = all ? Points(curve.points.begin(), curve.points.end()) : thinned(curve.points, frame);
  for (std::size_t i = 0; i < points.size(); ++i) {
    out += cat("<circle class=\"f", curve.color, "\" cx=\"", number(frame.x(points[i].step)), "\" cy=\"",
               number(frame.y(points[i].value)), "\" r=\"", curve.style == Curve::Style::apart ? 5 : 3,
               "\" fill=\"", color_of(curve), '"');
    out += i < curve.labels.size() ? cat("><title>", escaped_html(curve.labels[i]), "</title></circle>\n")
                                   : std::string("/>\n");
  }
  return out;
}

std::string drawn(const Curve& curve, const Frame& frame) {
  switch (curve.style) {
    case Curve::Style::apart:
      return dots(curve, frame);
    case Curve::Style::dotted:
      return line(thinned(curve.points, frame), frame, stroke(curve, 2.2), curve.name) + dots(curve, frame);
    case Curve::Style::dashed:
      return line(thinned(curve.points, frame), frame, stroke(curve, 1.6, "stroke-dasharray=\"7 5\""));
    case Curve::Style::steps:
      break;
  }
  const bool smooth = is_smoothed(curve);
  std::string out = line(thinned(curve.points, frame), frame,
                         smooth ? stroke(curve, 1, "stroke-opacity=\"0.35\"") : stroke(curve, 2), curve.name);
  return smooth ? out + line(thinned(smoothed(curve.points), frame), frame, stroke(curve, 2.2)) : out;
}

std::vector<LegendEntry> entries_of(const Chart& chart) {
  std::vector<LegendEntry> out;
  for (const Curve& curve : chart.curves) {
    if (curve.name.empty() || curve.points.empty()) continue;
    const bool dashed = curve.style == Curve::Style::dashed;
    std::string text = curve.name;
    if (curve.with_last) text += ' ' + shown(curve.points.back().value, chart.unit);
    out.push_back({std::move(text), dashed ? stroke(curve, 1.6, "stroke-dasharray=\"7 5\"")
                                           : stroke(curve, is_smoothed(curve) ? 2.2 : 2)});
  }
  for (const std::string& remark : chart.remarks) out.push_back({remark, ""});
  return out;
}

/// `below`: how far down within another picture.
std::string draw_at(const Chart& chart, double below) {
  const std::vector<LegendEntry> entries = entries_of(chart);
  const Frame frame = frame_of(chart, rows_above(entries, chart.width));
  const Scale scale = Scale::of(chart.unit, frame.y_high);
  std::string out =
      cat("<svg xmlns=\"http://www.w3.org/2000/svg\"", below > 0 ? cat(" y=\"", number(below), '"') : "",
          " viewBox=\"0 0 ", chart.width, ' ', chart.height, "\" width=\"", chart.width, "\" height=\"",
          chart.height, "\" role=\"img\" aria-label=\"", escaped_html(chart.title), "\" data-frame=\"",
          number(frame.x_low, "%.17g"), ' ', number(frame.x_high, "%.17g"), ' ', number(frame.y_low, "%.17g"),
          ' ', number(frame.y_high, "%.17g"), ' ', left, ' ', frame.width - right, ' ', frame.top, ' ',
          frame.height - bottom, ' ', frame.logarithmic ? 1 : 0, ' ', number(scale.divisor, "%.17g"), ' ',
          escaped_html(scale.name), "\" font-family=\"system-ui, 'DejaVu Sans', Helvetica, sans-serif\" ",
          "font-size=\"13\" fill=\"#333333\">\n<rect class=\"ground\" width=\"100%\" height=\"100%\" "
          "fill=\"#ffffff\"/>\n",
          text_at(left, 28, "start", chart.title, " font-size=\"17\" font-weight=\"600\""));
  out += axes(frame, chart, scale);
  for (const Curve& curve : chart.curves)
    if (!curve.points.empty()) out += drawn(curve, frame);
  return out + legend(entries, chart) + "</svg>\n";
}

}  // namespace

std::string shown(double value, ValueUnit unit) {
  switch (unit) {
    case ValueUnit::bytes:
      return engine::human_bytes(static_cast<std::uint64_t>(std::max(0.0, value)));
    case ValueUnit::count:
      return engine::human_count(value);
    case ValueUnit::milliseconds:
      return value < 1e3 ? number(value, "%.3g") + " ms" : number(value / 1e3, "%.3g") + " s";
    case ValueUnit::share:
      return number(100 * value, "%.3g") + '%';
    case ValueUnit::plain:
      break;
  }
  const double size = std::abs(value);
  return number(value, size == 0 || (size >= 0.1 && size < 1e5) ? "%.2f" : "%.3g");
}

std::string escaped_html(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = std::max<std::size_t>(1, utf8_length(text));
    const char c = text[0];
    if (utf8_length(text) == 0 || (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t'))
      out += "\xEF\xBF\xBD";  // the replacement character
    else if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += text.substr(0, length);
    text.remove_prefix(length);
  }
  return out;
}

std::vector<double> nice_ticks(double low, double high, int count) {
  std::vector<double> ticks;
  if (!(high > low) || count < 1) return ticks;
  const double raw = (high - low) / count, magnitude = std::pow(10, std::floor(std::log10(raw)));
  const double scaled = raw / magnitude;
  const double step = magnitude * (scaled <= 1 ? 1 : scaled <= 2 ? 2 : scaled <= 5 ? 5 : 10);
  const double slack = 1e-9 * (high - low);
  for (double k = std::ceil((low - slack) / step); k * step <= high + slack; ++k) ticks.push_back(k * step);
  return ticks;
}

std::string draw(const Chart& chart) {
  return draw_at(chart, 0);
}

std::string draw_below_each_other(const std::vector<Chart>& charts) {
  if (charts.size() == 1) return draw(charts[0]);
  double width = 0, height = 0;
  std::string out;
  for (const Chart& chart : charts) {
    out += draw_at(chart, height);
    width = std::max(width, chart.width), height += chart.height;
  }
  return cat("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", width, ' ', height, "\" width=\"",
             width, "\" height=\"", height, "\">\n", out, "</svg>\n");
}

}  // namespace sherd::cli

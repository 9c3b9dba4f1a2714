#include "cli/plot.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/error.h"
#include "base/files.h"
#include "cli/command_line.h"
#include "cli/program.h"

namespace sherd::cli {
namespace {

using Point = LossCurve::Point;

constexpr double width = 960, height = 540;
constexpr double left = 72, right = 24, top = 48, bottom = 56;
constexpr const char* train_color = "#4477aa";
constexpr const char* validation_color = "#cc3311";
constexpr const char* entropy_color = "#228833";

std::string number(double value, const char* format = "%.2f") {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else
      out += c;
  }
  return out;
}

/// The data's ranges, and where they fall on the picture.
struct Frame {
  double x_low = 0, x_high = 1, y_low = 0, y_high = 1;
  double x(double step) const { return left + (step - x_low) / (x_high - x_low) * (width - left - right); }
  double y(double loss) const {
    return height - bottom - (loss - y_low) / (y_high - y_low) * (height - top - bottom);
  }
};

/// The frame in which all these points lie, and `line` where it is given.
Frame frame_of(std::initializer_list<const std::vector<Point>*> curves, std::optional<double> line) {
  Frame frame;
  frame.x_low = frame.y_low = std::numeric_limits<double>::infinity();
  frame.x_high = frame.y_high = -std::numeric_limits<double>::infinity();
  const auto include = [&](double loss) {
    frame.y_low = std::min(frame.y_low, loss), frame.y_high = std::max(frame.y_high, loss);
  };
  for (const auto* points : curves)
    for (const Point& point : *points) {
      frame.x_low = std::min(frame.x_low, point.step), frame.x_high = std::max(frame.x_high, point.step);
      include(point.loss);
    }
  if (line) include(*line);
  if (frame.x_high <= frame.x_low) frame.x_low -= 1, frame.x_high += 1;
  const double margin =
      std::max(0.05 * (frame.y_high - frame.y_low), 1e-6 * std::max(1.0, std::abs(frame.y_high)));
  frame.y_low -= margin, frame.y_high += margin;
  return frame;
}

/// The lowest and the highest point of every pixel column, in the order of their steps.
std::vector<Point> thinned(const std::vector<Point>& points, const Frame& frame) {
  std::vector<Point> out;
  for (std::size_t i = 0; i < points.size();) {
    const double column = std::floor(frame.x(points[i].step));
    std::size_t low = i, high = i;
    for (; i < points.size() && std::floor(frame.x(points[i].step)) == column; ++i) {
      if (points[i].loss < points[low].loss) low = i;
      if (points[i].loss > points[high].loss) high = i;
    }
    out.push_back(points[std::min(low, high)]);
    if (low != high) out.push_back(points[std::max(low, high)]);
  }
  return out;
}

/// The mean over a window of a fiftieth of the curve around each point; narrower near the ends, where it
/// stays symmetric so as not to lag, and none for the last points, whose windows would hold next to nothing.
std::vector<Point> smoothed(const std::vector<Point>& points) {
  const std::size_t reach = std::max<std::size_t>(1, points.size() / 100);
  std::vector<double> sums{0};
  for (const Point& point : points) sums.push_back(sums.back() + point.loss);
  std::vector<Point> out;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t half = std::min({reach, i, points.size() - 1 - i});
    if (i >= reach && half < (reach + 1) / 2) break;
    out.push_back(
        {points[i].step, (sums[i + half + 1] - sums[i - half]) / static_cast<double>(2 * half + 1)});
  }
  return out;
}

std::string line(const std::vector<Point>& points, const Frame& frame, const std::string& style) {
  std::string out = "<polyline fill=\"none\" stroke-linejoin=\"round\" " + style + " points=\"";
  for (const Point& point : points)
    out += number(frame.x(point.step)) + ',' + number(frame.y(point.loss)) + ' ';
  return out + "\"/>\n";
}

std::string text_at(double x, double y, const std::string& anchor, const std::string& text,
                    const std::string& more = "") {
  return cat("<text x=\"", number(x), "\" y=\"", number(y), "\" text-anchor=\"", anchor, "\"", more, ">",
             escaped(text), "</text>\n");
}

/// As many decimals as the tick's step needs.
std::string tick_label(double value, double step) {
  const int decimals = step >= 1 ? 0 : static_cast<int>(std::ceil(-std::log10(step) - 1e-9));
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value == 0 ? 0.0 : value);
  return text;
}

struct AxisLabels {
  const char *x, *y;
  bool whole = false;  ///< x has whole numbers alone
};

std::string axes(const Frame& frame, const AxisLabels& labels) {
  std::string out;
  const auto step_of = [](const std::vector<double>& ticks) {
    return ticks.size() > 1 ? ticks[1] - ticks[0] : 1.0;
  };
  const auto rule = [](double x1, double y1, double x2, double y2, const char* color) {
    return cat("<path d=\"M", number(x1), ' ', number(y1), 'L', number(x2), ' ', number(y2), "\" stroke=\"",
               color, "\"/>\n");
  };
  const std::vector<double> ys = nice_ticks(frame.y_low, frame.y_high, 7),
                            xs = nice_ticks(frame.x_low, frame.x_high, 9);
  for (const double y : ys) {
    out += rule(left, frame.y(y), width - right, frame.y(y), "#e6e6e6");
    out += text_at(left - 8, frame.y(y) + 4, "end", tick_label(y, step_of(ys)));
  }
  for (const double x : xs) {
    if (labels.whole && x != std::floor(x)) continue;
    out += rule(frame.x(x), height - bottom, frame.x(x), height - bottom + 5, "#333333");
    out += text_at(frame.x(x), height - bottom + 20, "middle", tick_label(x, step_of(xs)));
  }
  out += rule(left, height - bottom, width - right, height - bottom, "#333333");
  out += rule(left, top, left, height - bottom, "#333333");
  out += text_at((left + width - right) / 2, height - 14, "middle", labels.x);
  const double middle = (top + height - bottom) / 2;
  out += text_at(20, middle, "middle", labels.y, cat(" transform=\"rotate(-90 20 ", number(middle), ")\""));
  return out;
}

struct LegendEntry {
  std::string text, style;
};

/// In the upper corner on the right, or where curves end there, on the left.
std::string legend(const std::vector<LegendEntry>& entries, bool on_the_left = false) {
  std::size_t longest = 0;
  for (const LegendEntry& entry : entries) longest = std::max(longest, entry.text.size());
  const double box_width = 56 + 7.2 * static_cast<double>(longest), row = 22;
  const double x = on_the_left ? left + 16 : width - right - box_width - 8, y = top + 6;
  std::string out = cat("<rect x=\"", number(x), "\" y=\"", number(y), "\" width=\"", number(box_width),
                        "\" height=\"", number(row * static_cast<double>(entries.size()) + 10),
                        "\" rx=\"4\" fill=\"#ffffff\" fill-opacity=\"0.9\" stroke=\"#cccccc\"/>\n");
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const double middle = y + 16 + row * static_cast<double>(i);
    out += cat("<path d=\"M", number(x + 10), ' ', number(middle), "h28\" ", entries[i].style, "/>\n");
    out += text_at(x + 46, middle + 4, "start", entries[i].text);
  }
  return out;
}

std::string stroke(const char* color, double thickness, const char* more = "") {
  return cat("stroke=\"", color, "\" stroke-width=\"", number(thickness, "%.1f"), "\"", *more ? " " : "",
             more);
}

/// `below`: how far down within another picture.
std::string begun(const std::string& title, double below = 0) {
  return cat("<svg xmlns=\"http://www.w3.org/2000/svg\"", below > 0 ? cat(" y=\"", number(below), '"') : "",
             " viewBox=\"0 0 ", width, ' ', height, "\" width=\"", width, "\" height=\"", height,
             "\" font-family=\"system-ui, 'DejaVu Sans', Helvetica, sans-serif\" ",
             "font-size=\"13\" fill=\"#333333\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
             text_at(left, 28, "start", title, " font-size=\"17\" font-weight=\"600\""));
}

}  // namespace

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

namespace {

/// A curve, thin where each step is drawn and its mean is, too.
std::string steps_and_mean(const std::vector<Point>& points, const Frame& frame, const char* color,
                           std::string& mean) {
  constexpr std::size_t enough_to_smooth = 50;
  const bool smooth = points.size() >= enough_to_smooth;
  mean = smooth ? stroke(color, 2.2) : stroke(color, 2);
  const std::string raw = smooth ? stroke(color, 1, "stroke-opacity=\"0.35\"") : mean;
  return line(thinned(points, frame), frame, raw) +
         (smooth ? line(thinned(smoothed(points), frame), frame, mean) : "");
}

std::string rewards_plot(const LossCurve& curve) {
  const Frame frame = frame_of({&curve.chosen, &curve.rejected, &curve.margins}, {});
  std::string out = begun("Rewards", height) + axes(frame, {"optimizer step", "reward", true});
  std::vector<LegendEntry> entries;
  for (const auto& [name, points, color] : {std::tuple("chosen", &curve.chosen, train_color),
                                            std::tuple("rejected", &curve.rejected, validation_color),
                                            std::tuple("margin", &curve.margins, entropy_color)}) {
    if (points->empty()) continue;
    std::string style;
    out += steps_and_mean(*points, frame, color, style);
    entries.push_back({cat(name, ' ', number(points->back().loss)), style});
  }
  if (!curve.accuracies.empty())
    entries.push_back({"accuracy " + number(curve.accuracies.back().loss), "stroke=\"none\""});
  return out + legend(entries, true) + "</svg>\n";
}

std::string losses_plot(const LossCurve& curve, const PlotOptions& options) {
  const Frame frame = frame_of({&curve.train, &curve.validation}, options.unigram_entropy);
  const char* unit = curve.chosen.empty() && curve.rejected.empty() ? "nats per token" : "loss";
  std::string out = begun(options.title) + axes(frame, {"optimizer step", unit, true});
  std::vector<LegendEntry> entries;
  if (options.unigram_entropy) {
    const std::string style = stroke(entropy_color, 1.6, "stroke-dasharray=\"7 5\"");
    const double y = frame.y(*options.unigram_entropy);
    out += cat("<path d=\"M", number(left), ' ', number(y), 'H', number(width - right), "\" ", style, "/>\n");
    entries.push_back({"unigram entropy " + number(*options.unigram_entropy), style});
  }
  if (!curve.train.empty()) {
    std::string mean;
    out += steps_and_mean(curve.train, frame, train_color, mean);
    const bool smooth = mean == stroke(train_color, 2.2);
    entries.push_back({smooth ? "training, each step and mean" : "training", mean});
  }
  if (!curve.validation.empty()) {
    const std::string style = stroke(validation_color, 2.2);
    out += line(curve.validation, frame, style);
    for (const Point& point : thinned(curve.validation, frame))
      out += cat("<circle cx=\"", number(frame.x(point.step)), "\" cy=\"", number(frame.y(point.loss)),
                 "\" r=\"3\" fill=\"", validation_color, "\"/>\n");
    entries.push_back({"validation " + number(curve.validation.back().loss), style});
  }
  return out + legend(entries) + "</svg>\n";
}

}  // namespace

std::string loss_plot(const LossCurve& curve, const PlotOptions& options) {
  const std::string losses = losses_plot(curve, options);
  if (curve.chosen.empty() && curve.rejected.empty()) return losses;
  return cat("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", width, ' ', 2 * height,
             "\" width=\"", width, "\" height=\"", 2 * height, "\">\n", losses, rewards_plot(curve),
             "</svg>\n");
}

std::string comparison_plot(const std::vector<ComparedPoint>& points, const std::string& title) {
  if (points.empty()) fail(ErrorKind::data, "there is nothing to compare in a picture");
  double most = 0;
  for (const ComparedPoint& point : points) most = std::max({most, point.predicted, point.measured});
  const Frame frame{0, 1.08 * most, 0, 1.08 * most};
  const std::string equal = stroke(entropy_color, 1.6, "stroke-dasharray=\"7 5\"");
  std::string out = begun(title) + axes(frame, {"predicted seconds", "measured seconds"});
  out += line({{0, 0}, {frame.x_high, frame.y_high}}, frame, equal);
  for (const ComparedPoint& point : points)
    out += cat("<circle cx=\"", number(frame.x(point.predicted)), "\" cy=\"", number(frame.y(point.measured)),
               "\" r=\"5\" fill=\"", train_color, "\"><title>", escaped(point.name), "</title></circle>\n");
  return out + legend({{"both the same", equal}}) + "</svg>\n";
}

LossCurve read_loss_curve(const std::filesystem::path& metrics) {
  std::ifstream in(metrics, std::ios::binary);
  if (!in)
    fail(ErrorKind::io, "cannot open the metrics file '", metrics.string(), "': ", std::strerror(errno));
  LossCurve curve;
  std::string text;
  for (std::int64_t row = 1; std::getline(in, text); ++row) {
    const auto object = nlohmann::json::parse(text, nullptr, false);
    if (!object.is_object() || !object.contains("step") || !object["step"].is_number()) {
      if (in.eof()) break;  // the last line is still being written
      fail(ErrorKind::data, "line ", row, " of '", metrics.string(), "' is not a line of metrics");
    }
    const double step = object["step"].get<double>();
    const auto add = [&](const char* key, std::vector<Point>& to) {
      if (const auto found = object.find(key); found != object.end() && found->is_number())
        to.push_back({step, found->get<double>()});
    };
    add("loss", curve.train);
    add("val_loss", curve.validation);
    const auto watched = object.find("objective");
    if (watched == object.end() || !watched->is_object()) continue;
    for (const auto& [key, to] : {std::pair("rewards/chosen", &curve.chosen),
                                  {"rewards/rejected", &curve.rejected},
                                  {"rewards/margins", &curve.margins},
                                  {"rewards/accuracies", &curve.accuracies}})
      if (const auto found = watched->find(key); found != watched->end() && found->is_number())
        to->push_back({step, found->get<double>()});
  }
  if (curve.train.empty() && curve.validation.empty())
    fail(ErrorKind::data, "'", metrics.string(), "' holds no loss to draw");
  const auto by_step = [](const Point& a, const Point& b) { return a.step < b.step; };
  for (std::vector<Point>* points :
       {&curve.train, &curve.validation, &curve.chosen, &curve.rejected, &curve.margins, &curve.accuracies})
    std::stable_sort(points->begin(), points->end(), by_step);
  return curve;
}

void plot_metrics(const std::filesystem::path& metrics, const std::filesystem::path& svg,
                  const PlotOptions& options) {
  write_file_atomically(svg, loss_plot(read_loss_curve(metrics), options));
}

CommandLine plot_line() {
  CommandLine line("plot", "Draws the training and validation losses of a metrics file.",
                   "--metrics F.jsonl --output F.svg [--unigram-entropy NATS] [--title TEXT]");
  line.value("metrics", "F.jsonl", "what `sherd train --metrics` wrote")
      .value("output", "F.svg", "where the picture goes")
      .value("unigram-entropy", "NATS", "draw a line at this loss")
      .value("title", "TEXT", "text above the picture", "Loss");
  return line;
}

void plot_command(const CommandLine& line) {
  PlotOptions options{.title = line.text("title"), .unigram_entropy = std::nullopt};
  if (line.has("unigram-entropy")) options.unigram_entropy = line.number("unigram-entropy");
  const std::string metrics = line.required("metrics"), output = line.required("output");
  line.require_apart("output", "metrics", metrics);
  plot_metrics(metrics, output, options);
}

}  // namespace sherd::cli

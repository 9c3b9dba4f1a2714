#include "cli/metrics/plot.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/files.h"
#include "cli/command_line.h"
#include "cli/metrics/charts.h"
#include "cli/program.h"

namespace sherd::cli {

std::string loss_plot(const Metrics& metrics, const PlotOptions& options) {
  const std::vector<Chart> all = charts_of(metrics);
  const Chart* losses = find_chart(all, "loss");
  if (!losses) fail(ErrorKind::data, "there is no loss to draw");
  std::vector<Chart> drawn{*losses};
  drawn[0].title = options.title;
  std::array<Point, 2> level;
  if (options.unigram_entropy) {
    double first = drawn[0].curves[0].points.front().step, last = first;
    for (const Curve& curve : drawn[0].curves)
      first = std::min(first, curve.points.front().step), last = std::max(last, curve.points.back().step);
    level = {Point{first, *options.unigram_entropy}, Point{last, *options.unigram_entropy}};
    drawn[0].curves.push_back({"unigram entropy", level, Curve::Style::dashed, 2});
  }
  if (const Chart* rewards = find_chart(all, "rewards")) {
    drawn.push_back(*rewards);
    drawn[1].legend_left = true;  // rewards rise
    if (const auto& accuracy = metrics.of("objective.rewards/accuracies"); !accuracy.empty())
      drawn[1].remarks.push_back("accuracy " + shown(accuracy.back().value));
  }
  return draw_below_each_other(drawn);
}

std::string comparison_plot(const std::vector<ComparedPoint>& points, const std::string& title) {
  if (points.empty()) fail(ErrorKind::data, "there is nothing to compare in a picture");
  double most = 0;
  std::vector<Point> at;
  Curve compared{.name = "", .points = {}, .style = Curve::Style::apart};
  for (const ComparedPoint& point : points) {
    most = std::max({most, 1.08 * point.predicted, 1.08 * point.measured});
    at.push_back({point.predicted, point.measured});
    compared.labels.push_back(point.name);
  }
  compared.points = at;
  const std::array<Point, 2> diagonal{Point{0, 0}, Point{most, most}};
  Chart chart{
      .id = "compared", .title = title, .y_label = "measured seconds", .x_label = "predicted seconds"};
  chart.curves = {{"both the same", diagonal, Curve::Style::dashed, 2, /*with_last=*/false}, compared};
  chart.whole_x = false, chart.from_zero = true;
  return draw(chart);
}

void plot_metrics(const std::filesystem::path& metrics, const std::filesystem::path& svg,
                  const PlotOptions& options) {
  const MetricsFile file = read_metrics(metrics);
  if (file.metrics().of("loss").empty() && file.metrics().of("val_loss").empty())
    fail(ErrorKind::data, "'", metrics.string(),
         "' holds no loss to draw: give what `sherd train --metrics` wrote, once it has done a step");
  write_file_atomically(svg, loss_plot(file.metrics(), options));
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

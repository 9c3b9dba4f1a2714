#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace sherd::cli {

/// The losses in a metrics file.
struct LossCurve {
  struct Point {
    double step = 0, loss = 0;
  };
  std::vector<Point> train, validation;  ///< by step; steps whose loss was not finite are left out
  /// For runs that learn preferences, likewise: rewards, margins, and the share of pairs with a margin above
  /// 0.
  std::vector<Point> chosen, rejected, margins, accuracies;
};

/// Reads what `--metrics` wrote, also while it is being written (an unfinished last line is left out). Throws
/// Error{io} when there is no such file, Error{data} naming the line that is not metrics, or when no step has
/// a loss.
LossCurve read_loss_curve(const std::filesystem::path& metrics);

struct PlotOptions {
  std::string title = "Loss";
  /// In nats per token: what a model that knows only frequencies reaches.
  std::optional<double> unigram_entropy;
};

/// A self-contained SVG picture, 960 × 540: every step's training loss (thinned where steps are closer than
/// pixels), its moving average, validation loss, and the unigram entropy as a dashed line. Of runs that learn
/// preferences a second one below, of rewards.
std::string loss_plot(const LossCurve& curve, const PlotOptions& options = {});

/// A step of a layout.
struct ComparedPoint {
  double predicted = 0, measured = 0;  ///< seconds
  std::string name;                    ///< told where a reader of the picture points at it
};
/// The same kind of picture: each point by what was predicted and measured, and the line on which both are
/// the same. Throws Error{data} where there is no point.
std::string comparison_plot(const std::vector<ComparedPoint>& points, const std::string& title);

/// Multiples of 1, 2 or 5 times a power of ten that lie in [low, high], about `count` of them.
std::vector<double> nice_ticks(double low, double high, int count);

/// read_loss_curve, loss_plot, and an atomic write to `svg`.
void plot_metrics(const std::filesystem::path& metrics, const std::filesystem::path& svg,
                  const PlotOptions& options = {});

}  // namespace sherd::cli

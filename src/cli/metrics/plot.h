#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/metrics/metrics_file.h"

namespace sherd::cli {

struct PlotOptions {
  std::string title = "Loss";
  /// The loss, in nats per token, of a model that knows only the frequencies of tokens.
  std::optional<double> unigram_entropy;
};

/// A self-contained SVG picture, 960 × 540: every step's training loss (thinned where steps are closer than
/// pixels), its moving average, validation loss, and the unigram entropy as a dashed line. Of runs that learn
/// preferences a second one below, of rewards. Throws Error{data} where no step has a loss.
std::string loss_plot(const Metrics& metrics, const PlotOptions& options = {});

/// A step of a layout.
struct ComparedPoint {
  double predicted = 0, measured = 0;  ///< seconds
  std::string name;                    ///< told where a reader of the picture points at it
};
/// The same kind of picture: each point by what was predicted and measured, and the line on which both are
/// the same. Throws Error{data} where there is no point.
std::string comparison_plot(const std::vector<ComparedPoint>& points, const std::string& title);

/// read_metrics, loss_plot, and an atomic write to `svg`.
void plot_metrics(const std::filesystem::path& metrics, const std::filesystem::path& svg,
                  const PlotOptions& options = {});

}  // namespace sherd::cli

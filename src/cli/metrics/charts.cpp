#include "cli/metrics/charts.h"

#include <algorithm>

namespace sherd::cli {
namespace {

struct ChartLine {
  const char *key, *name;
};
struct ChartKind {
  const char *id, *title, *y_label;
  ValueUnit unit;
  std::vector<ChartLine> lines;
  bool logarithmic = false;
};

const std::vector<ChartKind>& kinds() {
  static const std::vector<ChartKind> all{
      {"loss",
       "Loss",
       "nats per token",
       ValueUnit::plain,
       {{"loss", "training"}, {"val_loss", "validation"}}},
      {"rewards",
       "Rewards",
       "reward",
       ValueUnit::plain,
       {{"objective.rewards/chosen", "chosen"},
        {"objective.rewards/rejected", "rejected"},
        {"objective.rewards/margins", "margin"}}},
      {"accuracy",
       "Pairs with a margin above 0",
       "share",
       ValueUnit::share,
       {{"objective.rewards/accuracies", "accuracy"}}},
      {"rate", "Tokens per second", "tokens/s", ValueUnit::count, {{"tokens_per_s", "all ranks"}}},
      {"time", "Time of a step", "", ValueUnit::milliseconds, {{"step_ms", "step"}}, true},
      {"norm", "Gradient norm", "before clipping", ValueUnit::plain, {{"grad_norm", "norm"}}, true},
      {"memory",
       "Memory of rank 0",
       "peak",
       ValueUnit::bytes,
       {{"mem.device_peak", "device"}, {"mem.host_peak", "host"}, {"mem.nvme_peak", "NVMe"}}},
      {"lr", "Learning rate", "", ValueUnit::plain, {{"lr", "rate"}}},
      {"parts",
       "Parts of a step, mean of ranks",
       "",
       ValueUnit::milliseconds,
       {{"ranks.compute_ms", "own work"},
        {"ranks.wait_ms", "waits for ranks"},
        {"ranks.data_ms", "data"},
        {"ranks.nvme_ms", "waits for NVMe"}}},
      {"parts",
       "Parts of a step, median of ranks",
       "",
       ValueUnit::milliseconds,
       {{"ranks.compute_ms.median", "own work"},
        {"ranks.wait_ms.median", "waits for ranks"},
        {"ranks.data_ms.median", "data"},
        {"ranks.nvme_ms.median", "waits for NVMe"}}},
      {"mfu", "Use of the peak rate (MFU)", "share", ValueUnit::share, {{"mfu", "MFU"}}},
      {"traffic",
       "Sent to other ranks in a step",
       "rank 0",
       ValueUnit::bytes,
       {{"comm.all_reduce_bytes", "all-reduce"},
        {"comm.all_gather_bytes", "all-gather"},
        {"comm.reduce_scatter_bytes", "reduce-scatter"},
        {"comm.all_to_all_bytes", "all-to-all"},
        {"comm.broadcast_bytes", "broadcast"},
        {"comm.p2p_bytes", "point to point"}}},
      {"nvme",
       "NVMe traffic of a step",
       "rank 0",
       ValueUnit::bytes,
       {{"io.read_bytes", "read"}, {"io.write_bytes", "written"}}},
      {"imbalance",
       "Load of the fullest expert",
       "times the mean",
       ValueUnit::plain,
       {{"moe.imbalance", "mean of layers"}, {"moe.imbalance.most", "worst layer"}}},
      {"dropped",
       "Choices of experts that were dropped",
       "share",
       ValueUnit::share,
       {{"moe.dropped", "dropped"}}},
      {"routers",
       "Losses of routers",
       "without factors",
       ValueUnit::plain,
       {{"moe.balance_loss", "balance"}, {"moe.z_loss", "z-loss"}}},
      {"fp8", "Lost in FP8", "became zero", ValueUnit::share, {{"fp8.to_zero", "to zero"}}},
      {"scale", "Loss scale", "", ValueUnit::count, {{"loss_scale", "scale"}}, true}};
  return all;
}

bool tells_something(const std::vector<Point>& points, const std::string& key) {
  const double dull = key == "loss_scale" ? 1 : 0;  // no loss scale is 1 throughout
  const bool always = key == "loss" || key == "val_loss";
  return always ? !points.empty()
                : std::any_of(points.begin(), points.end(), [&](const Point& p) { return p.value != dull; });
}

Chart chart_of(const ChartKind& kind, const Metrics& metrics) {
  Chart out{.id = kind.id, .title = kind.title, .y_label = kind.y_label};
  out.unit = kind.unit, out.logarithmic = kind.logarithmic;
  for (std::size_t i = 0; i < kind.lines.size(); ++i) {
    const std::string key = kind.lines[i].key;
    const std::vector<Point>& points = metrics.of(key);
    if (!tells_something(points, key)) continue;
    out.curves.push_back({.name = kind.lines[i].name, .points = points});
    out.curves.back().color = static_cast<int>(i);
    if (key == "val_loss") out.curves.back().style = Curve::Style::dotted;
  }
  return out;
}

/// Values that were evaluated beside the loss, as many as there are colours.
Chart evaluated(const Metrics& metrics) {
  constexpr std::size_t most = 6;
  Chart out{.id = "evaluated", .title = "Evaluations", .y_label = "value"};
  for (const std::string& name : metrics.names("metrics.")) {
    if (out.curves.size() == most) break;
    out.curves.push_back({.name = name.substr(name.find('.') + 1), .points = metrics.of(name)});
    out.curves.back().style = Curve::Style::dotted;
    out.curves.back().color = static_cast<int>(out.curves.size()) - 1;
  }
  return out;
}

}  // namespace

std::vector<Chart> charts_of(const Metrics& metrics) {
  std::vector<Chart> out;
  for (const ChartKind& kind : kinds()) {
    if (Chart chart = chart_of(kind, metrics); !chart.curves.empty()) out.push_back(std::move(chart));
    if (std::string(kind.id) != "accuracy") continue;
    if (Chart chart = evaluated(metrics); !chart.curves.empty()) out.push_back(std::move(chart));
  }
  const bool preferences = !metrics.names("objective.rewards/").empty();
  if (preferences && !out.empty() && out[0].id == "loss") out[0].y_label = "loss";
  return out;
}

const Chart* find_chart(const std::vector<Chart>& charts, const std::string& id) {
  const auto found = std::find_if(charts.begin(), charts.end(), [&](const Chart& c) { return c.id == id; });
  return found == charts.end() ? nullptr : &*found;
}

}  // namespace sherd::cli

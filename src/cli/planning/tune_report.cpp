#include "cli/planning/tune_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/metrics/plot.h"
#include "cli/planning/plan_report.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string signed_percent(double share) {
  return engine::printed("%+.1f %%", 100 * share);
}

/// Paths may have any bytes.
std::string dumped(const OrderedJson& json) {
  return json.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

/// Steps of a quiet machine differ less.
constexpr double usual_spread = 0.15;

std::string notes_of(const TunedLayout& each) {
  std::string out = each.known ? "tried before" : "";
  if (each.result.spread > usual_spread)
    out += cat(out.empty() ? "" : ", ", "steps differ by ",
               engine::printed("%.0f %%", 100 * each.result.spread));
  return out;
}

std::string table(const TuneReport& report) {
  std::vector<std::vector<std::string>> rows{{"layout", "trial", "micro-batch", "ZeRO", "recompute",
                                              "predicted s", "measured s", "error", "tokens/s", ""}};
  const auto add = [&](std::size_t place) {
    const TunedLayout& each = report.layouts[place];
    std::vector<std::string> row = layout_cells(each.plan.layout);
    row.insert(row.begin() + 1, std::to_string(place + 1));
    row.push_back(engine::printed("%.4g", each.plan.time.seconds));
    if (!each.ran()) {
      row.insert(row.end(), {"", "", "", each.tried ? "failed" : "not tried yet"});
    } else {
      const double seconds = each.result.step_seconds;
      row.insert(row.end(),
                 {engine::printed("%.4g", seconds), signed_percent(each.plan.time.seconds / seconds - 1),
                  engine::human_count(each.plan.tokens_per_second() * each.plan.time.seconds / seconds),
                  notes_of(each)});
    }
    rows.push_back(std::move(row));
  };
  std::string failures;
  bool waits = false;
  for (const std::size_t i : report.ran()) add(i);
  for (std::size_t i = 0; i < report.layouts.size(); ++i) {
    const TunedLayout& each = report.layouts[i];
    if (each.ran()) continue;
    add(i);
    waits |= !each.tried;
    if (each.tried) failures += cat("trial ", i + 1, " failed: ", each.result.failure, "\n");
  }
  if (waits) failures += "Time was over: the same command goes on with those that were not tried.\n";
  return cat(engine::format_table(rows), failures.empty() ? "" : "\n", failures);
}

std::string rates_of(const TuneReport& report) {
  const planning::Correction& by = report.correction;
  const TuneReport::Errors before = report.errors(false), after = report.errors(true);
  const auto times = [](double factor) { return engine::printed("%.3g", factor); };
  return cat("\nPredictions are off by ", engine::printed("%.1f %%", 100 * before.median),
             " in the median, at most by ", signed_percent(before.worst), ". Kernels take ",
             times(by.kernels), " times as long as by the machine's rates, exchanges ", times(by.exchange),
             ", the update ", times(by.update), ": with these corrected (", report.machine_file, "), ",
             engine::printed("%.1f %%", 100 * after.median), " and ", signed_percent(after.worst), ".\n");
}

OrderedJson json_of(const TunedLayout& each) {
  OrderedJson out;
  for (const auto& [key, value] : each.plan.keys()) out["keys"][key] = value;
  out["predicted_step_s"] = each.plan.time.seconds;
  out["tried"] = each.tried, out["tried_before"] = each.known;
  if (each.ran()) out["step_s"] = each.result.step_seconds, out["spread"] = each.result.spread;
  if (each.tried && !each.ran()) out["failure"] = each.result.failure;
  out["config"] = each.config;
  return out;
}

}  // namespace

std::vector<std::size_t> TuneReport::ran() const {
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i < layouts.size(); ++i)
    if (layouts[i].ran()) out.push_back(i);
  const auto per_token = [&](std::size_t i) {
    const planning::Plan& plan = layouts[i].plan;
    return layouts[i].result.step_seconds / (plan.tokens_per_second() * plan.time.seconds);
  };
  std::stable_sort(out.begin(), out.end(),
                   [&](std::size_t a, std::size_t b) { return per_token(a) < per_token(b); });
  return out;
}

std::vector<planning::MeasuredStep> TuneReport::measured() const {
  std::vector<planning::MeasuredStep> out;
  for (const std::size_t i : ran()) out.push_back({layouts[i].plan.time, layouts[i].result.step_seconds});
  return out;
}

TuneReport::Errors TuneReport::errors(bool corrected) const {
  std::vector<double> all;
  for (const std::size_t i : ran()) {
    const TunedLayout& each = layouts[i];
    all.push_back((corrected ? each.corrected : each.plan.time.seconds) / each.result.step_seconds - 1);
  }
  if (all.empty()) return {};
  std::sort(all.begin(), all.end(), [](double a, double b) { return std::abs(a) < std::abs(b); });
  return {std::abs(all[all.size() / 2]), all.back()};
}

std::string text_of(const TuneReport& report) {
  std::string out = table(report);
  if (report.ran().empty())
    return cat(out, "\nNo layout ran. What they printed is in ", report.folder, "/trial-*.log.\n");
  out += rates_of(report);
  if (const double off = 1 + std::abs(report.errors(false).worst); off > 1.75)
    out +=
        "Predictions are that far off where the machine's file is of another machine, or where this one did "
        "other things meanwhile.\n";
  if (!report.next.empty()) {
    out += "By corrected rates a layout that was not tried comes first:";
    for (const std::string& override : report.next) out += " " + override;
    out += cat(". To try it, call again with --machine ", report.machine_file, ".\n");
  }
  const int ranks = report.layouts[report.ran().front()].plan.layout.ranks;
  return cat(out, "The fastest is written to ", report.best_file, ": ", report.launcher,
             report.launcher.empty() ? "" : " ", train_line(report.best_file, ranks), "\n");
}

std::string json_of(const TuneReport& report) {
  OrderedJson out;
  out["layouts"] = OrderedJson::array();
  for (const TunedLayout& each : report.layouts) out["layouts"].push_back(json_of(each));
  if (report.ran().empty()) return dumped(out);
  const planning::Correction& by = report.correction;
  out["correction"] = {{"kernels", by.kernels}, {"exchange", by.exchange}, {"update", by.update}};
  const TuneReport::Errors before = report.errors(false), after = report.errors(true);
  out["median_error"] = before.median, out["worst_error"] = before.worst;
  out["corrected_median_error"] = after.median, out["corrected_worst_error"] = after.worst;
  out["best"] = report.ran().front();
  out["best_config"] = report.best_file, out["machine"] = report.machine_file;
  out["next"] = report.next;
  return dumped(out);
}

std::string plot_of(const TuneReport& report) {
  std::vector<ComparedPoint> points;
  for (const std::size_t i : report.ran()) {
    const TunedLayout& each = report.layouts[i];
    std::string name;
    for (const std::string& cell : layout_cells(each.plan.layout)) name += (name.empty() ? "" : ", ") + cell;
    points.push_back({each.plan.time.seconds, each.result.step_seconds, name});
  }
  return comparison_plot(points, "Seconds of a step, predicted and measured");
}

}  // namespace sherd::cli

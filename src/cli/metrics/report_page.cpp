#include "cli/metrics/report_page.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "cli/metrics/charts.h"
#include "cli/metrics/page_parts.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

using Facts = ReportContent::Facts;

std::string table_of(const Facts& facts) {
  std::string out = "<table class=\"facts\">\n";
  for (const auto& [name, value] : facts)
    out +=
        cat("<tr><th scope=\"row\">", escaped_html(name), "</th><td>", escaped_html(value), "</td></tr>\n");
  return out + "</table>\n";
}

std::string section(const char* id, const char* heading, const std::string& body) {
  return cat("<section aria-labelledby=\"", id, "\">\n<h2 id=\"", id, "\">", heading, "</h2>\n", body,
             "</section>\n");
}

double median_of_last(const std::vector<Point>& points, std::size_t count) {
  std::vector<double> values;
  for (std::size_t i = points.size() - std::min(points.size(), count); i < points.size(); ++i)
    values.push_back(points[i].value);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

std::string at_step(const Point& point) {
  return cat(" at step ", static_cast<std::int64_t>(point.step));
}

Facts summary_of(const Metrics& metrics) {
  Facts out{{"Steps", std::to_string(metrics.last_step())}};
  if (metrics.restarts() > 0)
    out.emplace_back("Steps begun again",
                     cat(counted(metrics.restarts(), "time"), ", as where a run is resumed"));
  const auto less = [](const Point& a, const Point& b) { return a.value < b.value; };
  for (const auto& [key, name] :
       {std::pair("loss", "Training loss"), std::pair("val_loss", "Validation loss")}) {
    const std::vector<Point>& points = metrics.of(key);
    if (points.empty()) continue;
    const Point best = *std::min_element(points.begin(), points.end(), less);
    out.emplace_back(name, cat(shown(points.back().value), ", lowest ", shown(best.value), at_step(best)));
  }
  constexpr std::size_t newest = 100;
  const auto add = [&](const char* key, const char* name, ValueUnit unit, const char* after = "") {
    if (const std::vector<Point>& points = metrics.of(key); !points.empty())
      out.emplace_back(name, shown(median_of_last(points, newest), unit) + after);
  };
  if (const std::vector<Point>& tokens = metrics.of("tokens"); !tokens.empty() && tokens.back().value > 0)
    out.emplace_back("Tokens", engine::human_count(tokens.back().value));
  add("tokens_per_s", "Tokens per second", ValueUnit::count, " (median of the last steps)");
  add("step_ms", "Time of a step", ValueUnit::milliseconds, " (median of the last steps)");
  add("mfu", "MFU", ValueUnit::share, " (median of the last steps)");
  for (const auto& [key, name] : {std::pair("mem.device_peak", "Device memory"),
                                  {"mem.host_peak", "Host memory"},
                                  {"mem.nvme_peak", "NVMe"}})
    if (const std::vector<Point>& points = metrics.of(key); !points.empty() && points.back().value > 0)
      out.emplace_back(name, shown(points.back().value, ValueUnit::bytes) + " at the peak, of rank 0");
  if (const std::vector<Point>& skipped = metrics.of("skipped"); !skipped.empty()) {
    const auto count =
        std::count_if(skipped.begin(), skipped.end(), [](const Point& p) { return p.value > 0; });
    if (count > 0) out.emplace_back("Skipped steps", std::to_string(count));
  }
  return out;
}

/// How the last step's tokens went to experts, by layer; empty where the model has none.
std::string experts_of(const std::string& last_line) {
  const auto line = nlohmann::json::parse(last_line, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object() || !line.contains("moe")) return "";
  std::string out =
      "<div class=\"wide\"><table>\n<tr><th scope=\"col\">Layer</th><th scope=\"col\">Least chosen</th>"
      "<th scope=\"col\">Most chosen</th><th scope=\"col\">Most / mean</th><th "
      "scope=\"col\">Dropped</th></tr>\n";
  try {
    const nlohmann::json& moe = line["moe"];
    for (std::size_t i = 0; i < moe.at("layers").size(); ++i) {
      const auto tokens = moe.at("tokens").at(i).get<std::vector<double>>();
      double sum = 0;
      for (const double each : tokens) sum += each;
      if (tokens.empty() || sum <= 0) continue;
      const auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
      out += cat("<tr><th scope=\"row\">", escaped_html(moe["layers"][i].get<std::string>()), "</th>");
      for (const std::string& cell :
           {shown(*least / sum, ValueUnit::share), shown(*most / sum, ValueUnit::share),
            shown(moe.at("imbalance").at(i).get<double>()),
            shown(moe.at("dropped").at(i).get<double>(), ValueUnit::share)})
        out += cat("<td>", cell, "</td>");
      out += "</tr>\n";
    }
  } catch (const nlohmann::json::exception&) {
    return "";  // of another program, or with numbers that are not finite
  }
  return out + "</table></div>\n";
}

std::string figures_of(const Metrics& metrics) {
  std::string out = "<div class=\"figures\">\n";
  for (Chart& chart : charts_of(metrics)) {
    chart.width = 480, chart.height = 300, chart.legend_above = true;
    out += cat("<figure id=\"", chart.id, "\">\n", draw(chart),
               "<figcaption class=\"readout\" aria-live=\"off\">&nbsp;</figcaption>\n</figure>\n");
  }
  return out + "</div>\n";
}

std::string samples_of(const Facts& samples) {
  std::string out;
  for (const auto& [prompt, answer] : samples)
    out += cat("<div class=\"sample\"><pre class=\"prompt\">", escaped_html(prompt), "</pre><pre>",
               escaped_html(answer), "</pre></div>\n");
  return out;
}

}  // namespace

std::string report_page(const Metrics& metrics, const ReportContent& content) {
  std::string body;
  for (const std::string& remark : content.remarks)
    body += cat("<p class=\"remark\">", escaped_html(remark), "</p>\n");
  body += section("summary", "Summary", table_of(summary_of(metrics)));
  body += section("pictures", "Pictures", figures_of(metrics));
  if (const std::string experts = experts_of(content.last_line); !experts.empty())
    body += section("experts", "Experts in the last step", experts);
  if (!content.samples.empty()) body += section("samples", "Samples", samples_of(content.samples));
  if (!content.facts.empty()) body += section("machine", "Machine and versions", table_of(content.facts));
  if (!content.config.empty())
    body += section("configuration", "Configuration",
                    cat("<pre class=\"config\" tabindex=\"0\">", escaped_html(content.config), "</pre>\n"));
  const std::string title = escaped_html(content.title);
  return cat("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
             "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
             "'unsafe-inline'; ",
             "script-src 'unsafe-inline'\">\n<title>", title, "</title>\n<style>\n", page_style,
             "</style>\n</head>\n", "<body>\n<header>\n<h1>", title, "</h1>\n</header>\n<main>\n", body,
             "</main>\n<script>\n", page_script, "</script>\n</body>\n</html>\n");
}

}  // namespace sherd::cli

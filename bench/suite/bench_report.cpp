#include "bench/suite/bench_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "engine/report/machine.h"
#include "engine/report/report.h"

namespace sherd::bench {
namespace {

std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

/// Three digits, but never fewer than whole numbers.
std::string digits(double value) {
  const double size = std::abs(value);
  return formatted(size >= 100 ? "%.0f" : size >= 10 ? "%.1f" : size >= 1 ? "%.2f" : "%.3f", value);
}

std::string text_of(const ReportField& field) {
  struct Visitor {
    std::string operator()(std::monostate) const { return "-"; }
    std::string operator()(const std::string& text) const { return text; }
    std::string operator()(std::int64_t value) const { return std::to_string(value); }
    std::string operator()(double value) const { return digits(value); }
    std::string operator()(bool value) const { return value ? "yes" : "no"; }
  };
  return std::visit(Visitor(), field.value);
}

nlohmann::ordered_json json_of(const ReportField& field) {
  struct Visitor {
    nlohmann::ordered_json operator()(std::monostate) const { return nullptr; }
    nlohmann::ordered_json operator()(double value) const {
      return std::strtod(formatted("%.5g", value).c_str(), nullptr);
    }
    nlohmann::ordered_json operator()(const std::string& value) const { return value; }
    nlohmann::ordered_json operator()(std::int64_t value) const { return value; }
    nlohmann::ordered_json operator()(bool value) const { return value; }
  };
  return std::visit(Visitor(), field.value);
}

}  // namespace

void add_rates(std::vector<ReportField>& row, const Rounds& rounds, const std::string& name, double amount,
               const std::string& limit, double limit_amount, const std::string& key,
               const std::string& unit) {
  const double seconds = rounds.median_seconds(name);
  row.push_back({"median_ms", "ms", seconds * 1e3});
  row.push_back({key, unit, amount / seconds * 1e-9});
  ReportField limit_rate{"limit_" + key, "limit " + unit, {}}, ratio{"of_limit", "of limit", {}};
  if (!limit.empty()) {
    limit_rate.value = limit_amount / rounds.median_seconds(limit) * 1e-9;
    ratio.value = amount / limit_amount * rounds.ratio(limit, name);
  }
  row.push_back(std::move(limit_rate));
  row.push_back(std::move(ratio));
}

std::string as_table(const BenchReport& report) {
  std::string text = report.title + "\n";
  const char* separator = "";
  for (const ReportField& fact : report.facts) {
    if (fact.heading.empty()) continue;
    text += cat(separator, fact.heading, " ", text_of(fact));
    separator = ", ";
  }
  std::vector<std::vector<std::string>> cells;
  for (const auto& row : report.rows) {
    const bool first = cells.empty();
    if (first) cells.emplace_back();
    std::vector<std::string> line;
    for (const ReportField& field : row) {
      if (field.heading.empty()) continue;
      if (first) cells[0].push_back(field.heading);
      line.push_back(text_of(field));
    }
    cells.push_back(std::move(line));
  }
  text += cat("\n\n", engine::format_table(cells), "\nlimit: ", report.limit, "\n");
  for (const std::string& note : report.notes) text += note + "\n";
  return text;
}

std::string as_json(const BenchReport& report) {
  nlohmann::ordered_json object{{"bench", report.bench}, {"limit", report.limit}};
  for (const ReportField& fact : report.facts) object[fact.key] = json_of(fact);
  auto& cases = object["cases"] = nlohmann::ordered_json::array();
  for (const auto& row : report.rows) {
    nlohmann::ordered_json one;
    for (const ReportField& field : row) one[field.key] = json_of(field);
    cases.push_back(std::move(one));
  }
  object["notes"] = report.notes;
  return object.dump() + "\n";
}

void require_memory(double bytes, const std::string& advice) {
  const engine::MemorySizes sizes = engine::memory_sizes();
  std::uint64_t available = sizes.available;
  if (sizes.limit) available = std::min(available, sizes.limit);
  if (available == 0 || bytes <= 0.9 * static_cast<double>(available)) return;  // 0: the system does not say
  // Beyond 2^63 the difference no longer matters, and the conversion would be undefined.
  const auto needed = static_cast<std::uint64_t>(std::min(bytes, 9e18));
  fail(ErrorKind::memory, engine::human_bytes(needed), " of memory are needed and ",
       engine::human_bytes(available), " are available. ", advice);
}

}  // namespace sherd::bench

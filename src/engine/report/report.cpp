#include "engine/report/report.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "base/log.h"
#include "engine/engine.h"

namespace sherd::engine {

std::string printed(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string exact(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

namespace {

using device::Category;
using device::Tier;

/// Three digits: 1.23, 12.3, 123.
std::string three_digits(double value) {
  return printed(value < 9.995 ? "%.2f" : value < 99.95 ? "%.1f" : "%.0f", value);
}

std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string human_bytes(std::uint64_t bytes) {
  if (bytes < 1024) return cat(bytes, " B");
  constexpr const char* units[] = {" KiB", " MiB", " GiB", " TiB", " PiB", " EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  // 999.5 would print as "1000": the next unit reads better.
  for (; value >= 999.5 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return three_digits(value) + units[unit];
}

std::string human_count(double count) {
  if (!std::isfinite(count)) return "?";
  if (std::abs(count) < 999.5) return printed(count == std::floor(count) ? "%.0f" : "%.3g", count);
  constexpr const char* units[] = {"k", "M", "G", "T", "P"};
  double value = count / 1000;
  std::size_t unit = 0;
  for (; std::abs(value) >= 999.5 && unit + 1 < std::size(units); ++unit) value /= 1000;
  return three_digits(value) + units[unit];
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 59.95) return printed("%.1fs", seconds);
  const auto whole = static_cast<long long>(std::llround(std::min(seconds, 1e15)));
  char text[64];
  if (whole < 3600)
    std::snprintf(text, sizeof text, "%lld:%02lld", whole / 60, whole % 60);
  else if (whole < 48 * 3600)
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
  else
    std::snprintf(text, sizeof text, "%lldd %02lldh", whole / 86400, whole / 3600 % 24);
  return text;
}

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (widths.size() <= i) widths.push_back(0);
      widths[i] = std::max(widths[i], width_of(row[i]));
    }
  std::string out;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (std::size_t i = 0; i < rows[r].size(); ++i) {
      const std::string space(widths[i] - width_of(rows[r][i]), ' ');
      if (i > 0) line += "  ";
      line += i == 0 ? rows[r][i] + space : space + rows[r][i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
    if (r > 0) continue;
    std::size_t total = 0;
    for (std::size_t i = 0; i < widths.size(); ++i) total += widths[i] + (i > 0 ? 2 : 0);
    out += std::string(total, '-') + '\n';
  }
  return out;
}

MemoryReport MemoryReport::of(device::Device& device) {
  MemoryReport report;
  const device::Ledger& ledger = device.ledger();
  std::uint64_t peak = 0;
  for (int t = 0; t < device::tier_count; ++t) {
    const auto tier = static_cast<Tier>(t);
    TierMemory& memory = report.tiers[static_cast<std::size_t>(t)];
    for (int c = 0; c < device::category_count; ++c) {
      memory.current[static_cast<std::size_t>(c)] = ledger.current(tier, static_cast<Category>(c));
      memory.peak[static_cast<std::size_t>(c)] = ledger.peak(tier, static_cast<Category>(c));
    }
    memory.total_current = ledger.current(tier), memory.total_peak = ledger.peak(tier),
    memory.limit = ledger.limit(tier);
    if (tier == Tier::nvme || (tier == Tier::device && device.processor_tier() != tier)) continue;
    report.held += memory.total_current;
    peak = std::max(peak, memory.total_peak);
  }
  // The allocator's memory only grows: what it has now is the most that it had.
  report.held = std::max(report.held + device.unused_bytes(), peak);
  return report;
}

namespace {

MemoryReport largest_of(std::span<const MemoryReport> ranks) {
  MemoryReport most;
  const auto raise = [](std::uint64_t& to, std::uint64_t value) { to = std::max(to, value); };
  for (const MemoryReport& rank : ranks) {
    raise(most.held, rank.held);
    for (std::size_t t = 0; t < most.tiers.size(); ++t) {
      auto& memory = most.tiers[t];
      for (std::size_t c = 0; c < memory.peak.size(); ++c) {
        raise(memory.current[c], rank.tiers[t].current[c]);
        raise(memory.peak[c], rank.tiers[t].peak[c]);
      }
      raise(memory.total_current, rank.tiers[t].total_current);
      raise(memory.total_peak, rank.tiers[t].total_peak);
      raise(memory.limit, rank.tiers[t].limit);
    }
  }
  return most;
}

}  // namespace

std::string memory_table(std::span<const MemoryReport> ranks) {
  const MemoryReport report = largest_of(ranks);
  std::vector<std::vector<std::string>> rows{
      {ranks.size() > 1 ? cat("memory (largest of ", ranks.size(), " ranks)") : "memory", "now", "peak"}};
  for (int t = 0; t < device::tier_count; ++t) {
    const MemoryReport::TierMemory& memory = report.tiers[static_cast<std::size_t>(t)];
    if (memory.total_peak == 0) continue;
    const std::string tier(device::name_of(static_cast<Tier>(t)));
    for (int c = 0; c < device::category_count; ++c) {
      const auto i = static_cast<std::size_t>(c);
      if (memory.peak[i] == 0) continue;
      rows.push_back({cat(tier, " ", device::name_of(static_cast<Category>(c))),
                      human_bytes(memory.current[i]), human_bytes(memory.peak[i])});
    }
    const std::string limit = memory.limit ? cat(" (limit ", human_bytes(memory.limit), ")") : "";
    rows.push_back(
        {tier + " total" + limit, human_bytes(memory.total_current), human_bytes(memory.total_peak)});
  }
  if (rows.size() == 1) rows.push_back({"nothing was allocated"});
  if (report.held > 0) rows.push_back({"memory held", "", human_bytes(report.held)});
  return format_table(rows);
}

std::string traffic_table(const std::vector<comm::ProcessGroups::AxisTraffic>& traffic, std::int64_t steps) {
  comm::Traffic all;
  for (const auto& [axis, bytes] : traffic) all.add(bytes);
  std::vector<std::pair<std::string, std::uint64_t>> lines{{"all-reduce", all.all_reduce},
                                                           {"all-gather", all.all_gather},
                                                           {"reduce-scatter", all.reduce_scatter},
                                                           {"all-to-all", all.all_to_all},
                                                           {"broadcast", all.broadcast},
                                                           {"point to point", all.p2p},
                                                           {"scalars", all.scalars},
                                                           {"total", all.payload() + all.scalars}};
  if (traffic.size() > 1)
    for (const auto& [axis, bytes] : traffic)
      lines.push_back({cat("of it, ", comm::name_of(axis), " group"), bytes.payload() + bytes.scalars});
  std::vector<std::vector<std::string>> rows{{"sent to other ranks", "in all", "per step"}};
  for (const auto& [name, bytes] : lines)
    if (bytes > 0 || name == "total")
      rows.push_back({name, human_bytes(bytes),
                      steps > 0 ? human_bytes(bytes / static_cast<std::uint64_t>(steps)) : "-"});
  return format_table(rows);
}

std::string experts_table(const std::vector<std::pair<std::string, parallel::RoutingTotals>>& layers) {
  std::vector<std::vector<std::string>> rows{
      {"experts", "least", "most", "most / mean", "dropped", "balance loss", "z-loss"}};
  for (const auto& [name, layer] : layers) {
    if (layer.choices == 0) continue;
    const auto [least, most] = std::minmax_element(layer.per_expert.begin(), layer.per_expert.end());
    const auto share = [&](std::int64_t n) {
      return printed("%.2f %%", 100 * static_cast<double>(n) / static_cast<double>(layer.choices));
    };
    const double batches = static_cast<double>(layer.micro_batches);
    rows.push_back({name, share(*least), share(*most), printed("%.3f", layer.imbalance()),
                    share(layer.dropped), printed("%.4f", layer.balance / batches),
                    printed("%.4f", layer.z / batches)});
  }
  return format_table(rows);
}

namespace {

void log_memory(const device::Ledger& ledger) {
  std::string line;
  for (int c = 0; c < device::category_count; ++c) {
    const auto category = static_cast<device::Category>(c);
    line += cat(" | ", device::name_of(category), ' ', ledger.current(device::Tier::device, category),
                " (peak ", ledger.peak(device::Tier::device, category), ')');
  }
  log_info("memory of rank 0's device (bytes)", line);
}

}  // namespace

void log_step(const Engine& engine) {
  const config::Config& config = engine.config();
  const StepReport& report = engine.last_step();
  std::string lrs;  // of all parameter groups, where there are several
  for (std::size_t i = 0; report.lr.size() > 1 && i < report.lr.size(); ++i)
    lrs += cat(i == 0 ? " lrs=" : ",", report.lr[i]);
  log_info("step=", engine.global_steps(), " loss=", report.loss, " grad_norm=", report.grad_norm,
           " lr=", report.lr.empty() ? 0.0 : report.lr.front(), lrs, " skipped=", engine.skipped_steps(),
           config.precision.compute == DType::f16 ? cat(" loss_scale=", report.loss_scale) : std::string());
  if (config.wall_clock_breakdown)
    log_info("time (ms) | forward ", report.times.forward, " | backward ", report.times.backward, " | step ",
             report.times.update);
  if (config.memory_breakdown) log_memory(engine.device().ledger());
}

}  // namespace sherd::engine

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/process_groups.h"
#include "device/device.h"
#include "sharding/parallel/experts/moe.h"

// This folder holds what a run tells.
//
//   report.h         numbers as text, tables, the reports of memory, traffic and experts, a line per step
//   metrics.h        what --metrics writes, and its keys
//   step_record.h    what a run's folder tells of its steps, for `sherd verify`
//   prometheus.h     the same to Prometheus, over HTTP
//   monitor.h        TensorBoard and CSV: what they are told; log_files.h: on disk, in lines that survive a
//                    crash
//   trace.h          what --trace records; trace_table.cpp: the table at the end
//   progress.h       the line on a terminal; base/terminal.h: how it is drawn and removed
//   rank_times.h     how long each rank computes and waits, and who is slow
//   flight_file.h    a rank's last calls, written where it hangs or fails
//   gemm_probe.h     how fast this machine multiplies, for utilisation

namespace sherd {
class Engine;
}

namespace sherd::engine {

/// The value as std::printf() prints it.
std::string printed(const char* format, double value);
/// The value with the fewest digits that read back to the same number.
std::string exact(double value);
/// "0 B", "512 B", "1.50 KiB", "12.3 MiB", "139 GiB": three digits, powers of 1024.
std::string human_bytes(std::uint64_t bytes);
/// "7", "12.3k", "1.50M", "139G": three digits, powers of 1000.
std::string human_count(double count);
/// "8.2s", "2:05", "1:02:05", "3d 04h".
std::string human_seconds(double seconds);

/// Rows of cells in columns as wide as they need, the first flush left, the others flush right; a rule under
/// the first row. Ends with a newline. Widths count code points.
std::string format_table(const std::vector<std::vector<std::string>>& rows);

/// One rank's ledger at one time, as plain numbers that can travel between ranks.
struct MemoryReport {
  struct TierMemory {
    std::array<std::uint64_t, device::category_count> current{}, peak{};
    std::uint64_t total_current = 0, total_peak = 0, limit = 0;
  };
  std::array<TierMemory, device::tier_count> tiers{};
  /// The most of the processor's memory so far: what is tracked (on CPUs of the tiers device and host), and
  /// what the allocator keeps between blocks for later ones.
  std::uint64_t held = 0;
  static MemoryReport of(device::Device& device);
};

/// Tier × category, current and peak. With several ranks, the largest of each cell over the ranks. Tiers and
/// categories that never held a byte are left out; a total's peak is the peak of the sum, not the sum of the
/// peaks.
std::string memory_table(std::span<const MemoryReport> ranks);

/// Bytes by collective, in all and per step, as rank 0 (or whoever's `traffic` it is) sent them. Collectives
/// that moved nothing are left out.
std::string traffic_table(const std::vector<comm::ProcessGroups::AxisTraffic>& traffic, std::int64_t steps);

/// The work of routers, by the path of each layer of experts: the share of the choices that the least and the
/// most loaded expert have, the latter over the mean, the share dropped, and mean losses.
std::string experts_table(const std::vector<std::pair<std::string, parallel::RoutingTotals>>& layers);

/// Rank 0's lines of a step that steps_per_print asks for: losses and rates, and with wall_clock_breakdown
/// and memory_breakdown the times of phases and what the device holds.
void log_step(const Engine& engine);

}  // namespace sherd::engine

#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/trace_range.h"
#include "engine/distributed.h"
#include "engine/step/step_report.h"
#include "offload/store.h"

namespace sherd::engine {

/// Seconds of one rank's steps, from the first instruction of each to the end of its update. `computing` and
/// `instructions` are without waits.
struct TraceTotals {
  double steps = 0;
  double computing = 0;            ///< forward, backward and weight gradients
  double stages = 0, storage = 0;  ///< waits for other stages; for NVMe
  double io = 0, hidden_io = 0;    ///< reads or writes of NVMe were under way in them; and the rank computed
  std::array<double, 16> instructions{};  ///< by Instruction::Op
  std::int64_t step_count = 0;
  bool whole = true;  ///< false: the trace was full before the end
};

/// Records what one rank runs, and when: instructions, what they consist of (blocks, collectives, waits), and
/// transfers of NVMe. Engine::set_trace() fills it. On a GPU, instructions last until their work is queued.
class Trace final : public InstructionObserver, public device::RangeObserver {
 public:
  /// `most`: slices to keep; what comes later is left out.
  explicit Trace(std::size_t most = 200'000);

  // ---- from the rank's thread ----
  void begin(const sharding::Instruction& instruction) override;
  void end(const sharding::Instruction& instruction, double waited) override;
  void begin_range(std::string_view what, std::string_view of) override;
  void end_range() override;
  /// From any thread.
  void transferred(const offload::TransferTime& time);

  TraceTotals totals() const;
  /// The events of Chrome's trace format, separated by commas: process `rank`; instructions and what is
  /// inside of them on thread 0, NVMe's reads and writes as asynchronous events.
  std::string events(int rank) const;

 private:
  using Time = std::int64_t;  ///< nanoseconds of the system's clock, as far as the steady one is even
  struct TimedRange {
    int name = 0;  ///< in names_
    Time begin = 0, end = 0;
    std::int64_t micro_batch = -1;
    int chunk = -1;  ///< −1: no instruction
  };
  struct NvmeTransfer {
    bool write = false;
    std::size_t bytes = 0;
    Time begin = 0, end = 0;
  };
  Time at(std::chrono::steady_clock::time_point time) const;
  int name(std::string text);
  bool has_room();
  void add_wait(Time begin, Time end, double& total);

  const std::size_t most_;
  const Time offset_;  ///< added to the steady clock's time
  std::map<std::string, int, std::less<>> numbers_;
  std::vector<const std::string*> names_;
  std::vector<TimedRange> slices_;
  std::vector<TimedRange> open_;  ///< ranges, the innermost last
  TimedRange instruction_;        ///< under way where op_ is
  std::optional<sharding::Instruction::Op> op_;
  bool in_step_ = false;
  Time step_begin_ = 0;
  TraceTotals totals_;
  struct Interval {
    Time begin, end;
  };
  std::vector<Interval> steps_;
  std::vector<Interval> computing_, waits_;  ///< instructions that compute; waits inside of them
  mutable std::mutex mutex_;
  std::vector<NvmeTransfer> transfers_;  ///< guarded by mutex_
  bool transfers_left_out_ = false;      ///< guarded by mutex_
};

/// All ranks' traces as one file for chrome://tracing or ui.perfetto.dev, written by rank 0. Collective.
/// Throws Error{io} on all ranks where it cannot be written.
void write_trace(const Distributed& dist, const Trace& trace, const std::string& path);

/// The final report's lines: shares of instructions, the bubble where there are `stages`, I/O beside
/// computing. `ranks`: all ranks' totals.
std::string trace_table(const std::vector<TraceTotals>& ranks, int stages);

}  // namespace sherd::engine

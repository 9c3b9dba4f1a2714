#pragma once

#include <optional>
#include <string>

#include "engine/estimate/dry_run.h"
#include "engine/report/report.h"

namespace sherd::engine {

/// The needs of one rank of a run. The totals are those of every other rank of its stage and replica; between
/// parameters, gradients, optimizer and padding they are cut a little differently.
struct Estimate {
  int rank = 0;  ///< which
  /// `current`: held once the engine is built, model states and the buffers that live as long.
  MemoryReport states;
  MemoryReport peaks;     ///< `peak`: the most that training and evaluation hold at any moment
  comm::Traffic traffic;  ///< sent by one optimizer step
  std::vector<comm::ProcessGroups::AxisTraffic> traffic_by_axis;  ///< the same apart
  std::uint64_t exchange = 0;  ///< host memory that exchanges take untracked (comm/memory.h)
  /// Bytes of the host tier that copying states for a save in the background takes, where `sherd train` saves
  /// so: among the peaks where it fits within device.host_memory_limit; else it saves while training waits.
  std::uint64_t snapshot = 0;
  bool snapshot_fits = true;
  /// Bytes in training.local_save_dir for this rank's file and the copy that it keeps for another, twice: the
  /// older ones go when the newer are whole. 0: there are no local checkpoints.
  std::uint64_t local_checkpoints = 0;
  /// Bytes of the host tier, among the peaks, of the buffers through which such copies travel.
  std::uint64_t copy_buffers = 0;
  IoBytes io;  ///< moved to and from NVMe by one optimizer step
  /// The traffic of steps up to freeze_step, where replicas exchange momentum behind it; the fields above are
  /// of steps behind it.
  struct WarmUp {
    std::int64_t steps = 0;
    std::uint64_t sent = 0;
    IoBytes io;
  };
  std::optional<WarmUp> warm_up{};
  /// The values that pass from part to part of the model, where it is cut into stages.
  std::vector<ValueForm> values;
  std::string schedule;  ///< a line on it (describe_schedule()); may be empty
  double bubble = 0;     ///< a pipeline's (ideal_bubble())
};

/// The parts of a run that an estimate may leave out.
struct EstimateScope {
  bool evaluates = true;  ///< the run does, beside its steps
  /// Nobody asks for traffic and io: a pipeline's step has no more micro-batches than fill it. What a run
  /// keeps of each micro-batch to the end of a step, a loss, is of these alone.
  bool memory_alone = false;
  std::uint64_t device_room = 0;    ///< bytes beyond which nobody asks; 0: none
  std::vector<ValueForm> values{};  ///< Estimate::values of another rank of the run; empty: not known
};

/// Runs steps dry, and evaluations: everything that a run charges is charged. Takes milliseconds for small
/// models and about a second for a thousand layers, or for a thousand experts in some. Throws what DryRun
/// throws, and Error{memory} once the rank holds more than device_room.
Estimate estimate(const config::Config& config, const ModelSource& model, const MakeBatch& batch,
                  const DryRank& rank, const EstimateScope& scope = {});

}  // namespace sherd::engine

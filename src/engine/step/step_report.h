#pragma once

#include <cstdint>
#include <vector>

#include "sharding/instruction.h"

namespace sherd::engine {

/// Wall time of the last optimizer step by phase, in milliseconds, summed over its micro-batches. What is
/// updated while backward runs counts there. A GPU may be behind: unless wall_clock_breakdown asks for phases
/// that wait for it, its time counts where the thread has to wait, mostly in the update.
struct StepTimes {
  double forward = 0, backward = 0, update = 0;
  double total() const { return forward + backward + update; }
};

/// The last optimizer step, the same on every rank.
struct StepReport {
  std::int64_t step = 0;    ///< its number, from 1; 0: this engine has made none
  bool applied = false;     ///< false when the update was skipped: gradients overflowed, or had no targets
  bool has_targets = true;  ///< false: none of the step's tokens is a target of the loss
  double loss = 0;          ///< mean over ranks and micro-batches, of the unscaled loss; NaN without targets
  double grad_norm = 0;     ///< global L2 norm of the averaged gradients, unscaled, before clipping; NaN on
                            ///< overflow
  double loss_scale = 1;    ///< that the step's gradients were computed with
  std::vector<double> lr;   ///< used by the step, one per parameter group
  std::int64_t early_updates = 0;  ///< chunks of this rank's states that were updated before backward ended
  StepTimes times;
  StepTimes busy;  ///< the same without what this rank's thread waited for (base/waits.h)
};

/// Bytes that a rank has moved from and to NVMe.
struct IoBytes {
  std::uint64_t read = 0, written = 0;
  std::uint64_t bounced = 0;  ///< the part of both that was copied through buffers of the store on its way

  IoBytes operator-(const IoBytes& before) const {
    return {read - before.read, written - before.written, bounced - before.bounced};
  }
};

/// The newest whole local checkpoint of a run.
struct NewestLocal {
  std::int64_t step = -1;   ///< -1: there is none
  std::uint64_t bytes = 0;  ///< of all ranks' files, each counted once
  double seconds = 0;       ///< from its beginning until all machines had it; 0: an earlier start made it
};

/// How far training has come, as DeepSpeed counts it.
struct Counters {
  std::int64_t micro_steps = 0, global_steps = 0, global_samples = 0, skipped_steps = 0;
};

/// Told of each instruction that an executor runs, from the rank's thread: for traces.
class InstructionObserver {
 public:
  virtual ~InstructionObserver() = default;
  virtual void begin(const sharding::Instruction& instruction) = 0;
  /// `waited`: of the time since begin(), how long the thread waited for what other stages send, in seconds.
  /// Not called where the instruction throws.
  virtual void end(const sharding::Instruction& instruction, double waited) = 0;
};

}  // namespace sherd::engine

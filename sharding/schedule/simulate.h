#pragma once

#include <functional>
#include <vector>

#include "sharding/instruction.h"

namespace sherd::sharding {

/// How long a step takes, in seconds.
struct SimulatedStep {
  double seconds = 0;             ///< until the last stage is through with its list
  std::vector<double> computing;  ///< by stage: forward, backward and weight gradients
  std::vector<double> waiting;    ///< by stage: `reduce`, for what runs beside the list

  /// The time that stages do not compute, over the time that they do: (p − 1) / m with 1F1B of p like stages
  /// and m micro-batches (Narayanan et al. 2021, §2.2.1).
  double bubble() const;
};

/// How long a stage takes for an instruction.
struct InstructionTime {
  /// For a send, the time of the transfer; for a gather, until the parameters have come once it has begun.
  /// These go on beside the list, all others hold it up.
  double seconds = 0;
  /// Seconds of work that the instruction hands over to run beside the list, one piece after the other, as
  /// reductions of gradients behind backward. It may begin `handed_over_at` seconds into the instruction; its
  /// last `behind` seconds cannot begin before the instruction ends. `reduce` waits for all of it.
  double beside = 0, handed_over_at = 0, behind = 0;
};
using TimeOfInstruction = std::function<InstructionTime(int stage, const Instruction& instruction)>;

/// Runs `lists`, one per stage, without their work. A transfer begins once both sides have posted it and the
/// one before of its kind between the same two stages has ended; gathers of a stage follow each other. A
/// forward waits for its input and its chunk's parameters, a backward likewise. Throws Error{usage} naming
/// the instructions where stages wait for each other for ever, or where what one sends is not what the other
/// receives.
SimulatedStep simulate(const std::vector<std::vector<Instruction>>& lists, const TimeOfInstruction& time);

}  // namespace sherd::sharding

#pragma once

#include "sharding/instruction.h"

namespace sherd::engine {

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

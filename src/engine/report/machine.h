#pragma once

#include <cstdint>
#include <string>

namespace sherd::engine {

/// Whether this process may use io_uring, asked of the kernel itself: "available", or why not.
std::string io_uring_state();

struct MemorySizes {
  std::uint64_t total = 0, available = 0;  ///< bytes; 0 where the system does not say
  std::uint64_t swap = 0;                  ///< free swap space
  std::uint64_t limit = 0;                 ///< the control group's; 0: none
};
/// The sizes of memory as the system tells them, or, for a machine whose memory grows as it is used, as
/// SHERD_MACHINE_MEMORY does ("128GB"). Throws Error{usage} where that is no size.
MemorySizes memory_sizes();
/// Whether this machine's memory may grow as it is used: it has a balloon, or memory that is plugged in.
bool memory_may_grow();

/// Processor time since the system started, in seconds over all cores; zeros where the system does not say.
struct ProcessorTimes {
  double all = 0;   ///< busy or idle
  double busy = 0;  ///< by any program, and what a hypervisor took away
  double own = 0;   ///< by this process
};
ProcessorTimes processor_times();
/// The part of all processor time between two moments that others than this process took.
double share_of_others(const ProcessorTimes& from, const ProcessorTimes& to);

}  // namespace sherd::engine

#pragma once

#include <cstdint>
#include <string>

namespace sherd::cli {

/// Whether this process may use io_uring, asked of the kernel itself: "available", or why not.
std::string io_uring_state();

struct MemorySizes {
  std::uint64_t total = 0, available = 0;  ///< bytes; 0 where the system does not say
  std::uint64_t limit = 0;                 ///< of this process's control group; 0: none
};
MemorySizes memory_sizes();

}  // namespace sherd::cli

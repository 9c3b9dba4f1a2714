#pragma once

#include <cstdint>

namespace sherd::device {

/// What became of a stream's work where sequences of it that come again are run as graphs.
struct GraphCounts {
  std::uint64_t graphs = 0;           ///< made
  std::uint64_t launches = 0;         ///< of graphs
  std::uint64_t works_in_graphs = 0;  ///< by these launches
  std::uint64_t works_apart = 0;      ///< queued one by one
};

}  // namespace sherd::device

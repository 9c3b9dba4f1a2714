#pragma once

#include <string_view>

namespace sherd::device {

/// Names what the calling thread does until it goes, for a profiler: an NVTX range, which Nsight Systems
/// shows beside the kernels and copies that were queued meanwhile. Ranges of a thread nest. Without a
/// profiler, or in a build without CUDA, it does next to nothing.
class TraceRange {
 public:
  /// Called "what of", cut off after some hundred characters: {"forward", "h.3"}.
  explicit TraceRange(std::string_view what, std::string_view of = {});
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

}  // namespace sherd::device

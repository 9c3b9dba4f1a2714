#pragma once

#include <string_view>

namespace sherd::device {

/// Told of a thread's ranges as they begin and end. Ranges of a thread nest.
class RangeObserver {
 public:
  virtual ~RangeObserver() = default;
  virtual void begin_range(std::string_view what, std::string_view of) = 0;
  virtual void end_range() = 0;
};

/// Ranges of the calling thread are told to `observer` from here on; null: to nobody. Returns who was told
/// before. Called between ranges.
RangeObserver* observe_ranges(RangeObserver* observer);

/// Names what the calling thread does until it goes, for the thread's observer, and for a profiler: an NVTX
/// range, which Nsight Systems shows beside the kernels and copies that were queued meanwhile. Without
/// either it does next to nothing.
class TraceRange {
 public:
  /// Called "what of", cut off after some hundred characters: {"forward", "h.3"}.
  explicit TraceRange(std::string_view what, std::string_view of = {});
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

/// Begins an NVTX range of the calling thread, called "what of" and cut off after some hundred characters.
void push_profiler_range(std::string_view what, std::string_view of);
/// Ends the innermost one.
void pop_profiler_range();

}  // namespace sherd::device

#include "device/trace_range.h"

#include <utility>

namespace sherd::device {

namespace {
thread_local RangeObserver* observer_of_thread = nullptr;  // of one rank's thread, set by what it runs
}  // namespace

RangeObserver* observe_ranges(RangeObserver* observer) {
  return std::exchange(observer_of_thread, observer);
}

TraceRange::TraceRange(std::string_view what, std::string_view of) {
  push_profiler_range(what, of);
  if (observer_of_thread) observer_of_thread->begin_range(what, of);
}

TraceRange::~TraceRange() {
  if (observer_of_thread) observer_of_thread->end_range();
  pop_profiler_range();
}

}  // namespace sherd::device

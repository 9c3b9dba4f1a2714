#include "base/waits.h"

#include <chrono>
#include <utility>

namespace sherd {
namespace {

thread_local WaitTotals waits_of_thread;
thread_local bool thread_waits = false;

std::int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double& total_of(WaitFor what) {
  return what == WaitFor::ranks     ? waits_of_thread.ranks
         : what == WaitFor::storage ? waits_of_thread.storage
                                    : waits_of_thread.data;
}

}  // namespace

WaitTotals waited_so_far() {
  return waits_of_thread;
}

WaitScope::WaitScope(WaitFor what)
    : what_(what), outermost_(!std::exchange(thread_waits, true)), begin_(steady_ns()) {}

WaitScope::~WaitScope() {
  if (!outermost_) return;
  thread_waits = false;
  total_of(what_) += static_cast<double>(steady_ns() - begin_) * 1e-9;
}

}  // namespace sherd

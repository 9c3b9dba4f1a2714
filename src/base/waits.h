#pragma once

#include <cstdint>

namespace sherd {

/// The things that a thread may wait for: other ranks and their messages, NVMe, samples of a dataset.
enum class WaitFor : std::uint8_t { ranks, storage, data };

/// Seconds that a thread has waited.
struct WaitTotals {
  double ranks = 0, storage = 0, data = 0;

  double total() const { return ranks + storage + data; }
  WaitTotals operator-(const WaitTotals& before) const {
    return {ranks - before.ranks, storage - before.storage, data - before.data};
  }
};
/// The calling thread's so far.
WaitTotals waited_so_far();

/// While it lives, the calling thread counts as waiting. Inside of another scope it counts nothing.
class WaitScope {
 public:
  explicit WaitScope(WaitFor what);
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  const WaitFor what_;
  const bool outermost_;
  const std::int64_t begin_;  ///< nanoseconds of the steady clock
};

}  // namespace sherd

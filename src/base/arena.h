#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace sherd {

/// A fixed set of compute threads that one rank owns. Work is cut into chunks of `grain` items whatever the
/// number of threads, so that a kernel's result does not depend on how many there are. Every thread runs with
/// flush-to-zero and denormals-are-zero, with one OpenMP thread, and with an alternate stack for signals
/// (base/threads.h).
///
/// On oneTBB (a task_arena), or on std::thread where built with SHERD_STD_THREAD_ARENA.
class Arena {
 public:
  /// `threads` counts the calling thread. Throws Error{usage} for fewer than 1.
  ///
  /// With `cores`, all of them stay on these, the calling thread until the arena goes. Threads that it starts
  /// meanwhile inherit that. Throws Error{usage} when the process may not run there.
  explicit Arena(int threads, std::vector<int> cores = {});
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int threads() const;

  /// Calls body(begin, end) over chunks that cover [0, count), each of `grain` items but the last, and
  /// returns when all are done. The first exception thrown by a chunk is rethrown here. Nested calls run
  /// serially.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Sets flush-to-zero and denormals-are-zero on the calling thread.
void set_flush_denormals();

/// Cores that the calling thread may run on: how many, and which.
int available_cores();
std::vector<int> available_core_ids();

}  // namespace sherd

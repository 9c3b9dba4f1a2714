#pragma once

#include <vector_types.h>

#include <cstddef>
#include <memory>

#include "base/error.h"
#include "device/cache/block_cache.h"
#include "device/graph/graph_queue.h"
#include "device/stream.h"

namespace sherd::device::cuda {

/// Throws for a cudaError_t other than success: the call, CUDA's name and words for it, and what to do. The
/// kind is memory, config or io.
[[noreturn]] void fail_call(int status, const char* call);
inline void check_call(int status, const char* call) {
  if (status != 0) [[unlikely]]
    fail_call(status, call);
}

/// Makes a GPU the calling thread's current one while it lives, and for good where the thread had none that
/// this process uses.
class OnGpu {
 public:
  explicit OnGpu(int ordinal);
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  int before_ = -1;  ///< the GPU to go back to; -1: none
};

/// Calls f with the GPU as the current one, where nothing may throw: that it failed, later calls will say.
template <class Fn>
void quietly_on(int ordinal, const Fn& f) noexcept {
  try {
    const OnGpu on(ordinal);
    f();
  } catch (...) {
  }
}

inline dim3 dim3_of(const Extent3& extent) {
  return {extent.x, extent.y, extent.z};
}

/// Lets launches of a kernel on the current GPU have so much dynamic shared memory. Never less than before:
/// a graph may run the kernel with what an earlier launch had.
void allow_shared(const void* entry, std::size_t bytes);

/// A new stream of the GPU that does not wait for the legacy default stream. Any thread may queue work.
std::unique_ptr<StreamQueue> make_queue(int ordinal, bool urgent);
/// Makes CUDA graphs to be launched on `stream`, a cudaStream_t of the GPU that outlives them.
std::unique_ptr<GraphMaker> make_graph_maker(int ordinal, void* stream);

/// Memory of the GPU, allocated and freed in `compute`'s order out of a pool of its own.
std::unique_ptr<BlockSource> make_device_memory(int ordinal, Stream compute);
/// Page-locked memory of the host.
std::unique_ptr<BlockSource> make_pinned_memory(int ordinal);

}  // namespace sherd::device::cuda

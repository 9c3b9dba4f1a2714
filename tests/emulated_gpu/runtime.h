#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "emulated_gpu/card.h"

// Shared by the sources of the emulated runtime: runtime.cpp (errors, cards, memory) and runtime_work.cpp
// (streams, events, kernels, graphs).

namespace sherd::emulated_gpu {

using Lock = std::lock_guard<std::recursive_mutex>;

inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local int current_card = 0;

/// Remembers an error for cudaGetLastError().
inline cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

/// With mutex() locked, as all that follows.
struct State {
  std::map<cudaStream_t, std::shared_ptr<Queue>> streams;
  std::set<int> contexts;                     ///< cards on which this process has begun to work
  std::map<const void*, int> shared_allowed;  ///< bytes that kernels' launches were allowed
  Counts counts;
};
State& state();

/// Work on that card has begun in this process.
inline void begin_context(int card) {
  state().contexts.insert(card);
}

/// Null for a handle of no stream.
Queue* queue_of(cudaStream_t stream);

/// A work that is no kernel: queued, or captured.
cudaError_t queue_other(cudaStream_t stream, Work work);

}  // namespace sherd::emulated_gpu

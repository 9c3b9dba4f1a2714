#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/exchange/worker.h"
#include "device/accelerator.h"

namespace sherd::comm {

/// A board on which ranks that are threads of one process leave events for each other. Each rank writes its
/// own; one barrier lies between that and the others' reads, and two between that and the rank's next event
/// in the same place.
struct EventBoard {
  explicit EventBoard(int ranks) : left(static_cast<std::size_t>(ranks)) {}
  std::vector<std::array<device::Event, 2>> left;
};

/// Queues Worker::reduce() on `stream`, for memory that the GPU's kernels reach.
using GpuReduce = std::function<void(device::Accelerator& gpu, device::Stream& stream, const ReduceSpec& how,
                                     std::span<const std::byte* const> sources,
                                     std::span<std::byte* const> outs, std::int64_t count)>;

/// A worker that queues everything on a stream of its own beside the GPU's compute stream and never waits.
/// `events` must outlive it.
std::unique_ptr<Worker> make_gpu_worker(std::shared_ptr<device::Accelerator> gpu, GpuReduce reduce,
                                        EventBoard& events, int rank);

}  // namespace sherd::comm

#include "engine/update/update_buffers.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "device/trace_range.h"

namespace sherd::engine {

using sharding::Segment;
using sharding::StateBuffer;
using tensor::Tensor;

namespace {

constexpr std::size_t page = 4096;

/// Whether passes over elements have their part of the state: all but what is exchanged as a whole.
bool in_passes(const optim::State& state) {
  return state.over_replicas != optim::OverReplicas::spread;
}

/// Every lasting state that passes over elements read or write, gradients apart.
template <class SegmentLike, class Visit>
void for_each_state(SegmentLike& segment, const Visit& visit) {
  visit(segment.parameters());
  if (segment.masters()) visit(segment.masters());
  for (std::size_t i = 0; i < segment.moments().size(); ++i)
    if (in_passes(segment.states()[i])) visit(segment.moments()[i]);
}

std::size_t room_for(std::int64_t elements, DType dtype) {
  return (static_cast<std::size_t>(elements) * size_of(dtype) + page - 1) / page * page;
}

/// Bytes of the largest chunk in the given store.
std::size_t bytes_through(const offload::Store* store, std::span<const UpdateChunk> chunks) {
  std::size_t most = 0;
  for (const UpdateChunk& chunk : chunks) {
    std::size_t bytes = 0;
    for_each_state(*chunk.segment, [&](const StateBuffer& state) {
      if (state.stored() && state.store() == store) bytes += room_for(chunk.end - chunk.begin, state.dtype());
    });
    most = std::max(most, bytes);
  }
  return most;
}

/// Visits each stored state of the chunk's segment that is read, or written, with its part of the view.
template <class Visit>
void for_each_moved(const UpdateChunk& chunk, optim::Phase phase, const RuleUpdate& rule,
                    RuleUpdate::Access access, const UpdateView& view, const Visit& visit) {
  Segment& segment = *chunk.segment;
  const auto each = [&](StateBuffer& state, const Tensor& staged) {
    if (state.stored()) visit(state, staged);
  };
  if (rule.moves(chunk, phase, nullptr, access)) {
    each(segment.parameters(), view.parameters);
    if (segment.masters()) each(segment.masters(), view.masters);
  }
  for (std::size_t i = 0; i < view.moments.size(); ++i)
    if (rule.moves(chunk, phase, &segment.states()[i], access)) each(segment.moments()[i], view.moments[i]);
}

}  // namespace

UpdateBuffers::UpdateBuffers(const sharding::StateSources& sources, std::span<const UpdateChunk> chunks,
                             int count)
    : device_(sources.kernels.device()) {
  add_lane(sources.optimizer_store, chunks, count);
  if (sources.parameter_store != sources.optimizer_store) add_lane(sources.parameter_store, chunks, count);
  uses_.resize(static_cast<std::size_t>(count));
}

void UpdateBuffers::add_lane(offload::Store* store, std::span<const UpdateChunk> chunks, int count) {
  const std::size_t bytes = store ? bytes_through(store, chunks) : 0;
  if (bytes == 0) return;
  Lane lane;
  lane.store = store, lane.bytes = bytes;
  const std::size_t all = static_cast<std::size_t>(count) * bytes;
  lane.buffers = store->pages(all, device::Category::workspace);
  if (device_.accelerator() && !(lane.pin = device_.pin(lane.buffers.data(), all)))
    fail(ErrorKind::memory, "the system does not page-lock ", all,
         " bytes for buffers between NVMe and the GPU: raise the limit of locked memory (ulimit -l)");
  bytes_ += bytes;
  lanes_.push_back(std::move(lane));
}

UpdateView UpdateBuffers::view(const UpdateChunk& chunk, int buffer) const {
  const Segment& segment = *chunk.segment;
  std::vector<std::size_t> at(lanes_.size());
  const auto memory_of = [&](const StateBuffer& state) {
    if (!state.stored()) return state.range(chunk.begin, chunk.end);
    const std::int64_t elements = chunk.end - chunk.begin;
    std::size_t lane = 0;
    while (lanes_[lane].store != state.store()) ++lane;
    std::byte* data = lanes_[lane].buffers.data() + static_cast<std::size_t>(buffer) * lanes_[lane].bytes +
                      std::exchange(at[lane], at[lane] + room_for(elements, state.dtype()));
    const device::MemoryBlock block{data, static_cast<std::size_t>(elements) * size_of(state.dtype())};
    return Tensor::view_of(device::Storage(block, nullptr), 0, {elements}, state.dtype());
  };
  UpdateView out;
  out.segment = &segment;
  out.begin = chunk.begin;
  out.parameters = memory_of(segment.parameters());
  if (segment.masters()) out.masters = memory_of(segment.masters());
  for (std::size_t i = 0; i < segment.moments().size(); ++i)
    if (in_passes(segment.states()[i])) {
      out.moments.push_back(memory_of(segment.moments()[i]));
      out.scales.push_back(segment.scales(i, chunk.begin, chunk.end));
    }
  out.gradients = segment.gradients().range(chunk.begin, chunk.end);
  return out;
}

void UpdateBuffers::read(const UpdateChunk& chunk, optim::Phase phase, const RuleUpdate& rule, int buffer) {
  for_each_moved(chunk, phase, rule, RuleUpdate::Access::read, view(chunk, buffer),
                 [&](StateBuffer& state, const Tensor& to) {
                   use_of(buffer).reads.push_back(state.read(chunk.begin, to));
                 });
}

void UpdateBuffers::write(const UpdateChunk& chunk, optim::Phase phase, const RuleUpdate& rule, int buffer) {
  for_each_moved(chunk, phase, rule, RuleUpdate::Access::write, view(chunk, buffer),
                 [&](StateBuffer& state, const Tensor& from) {
                   use_of(buffer).writes.push_back(state.write(chunk.begin, from));
                 });
}

bool UpdateBuffers::ended(std::vector<offload::Io>& ios, bool wait) {
  if (!wait && !std::all_of(ios.begin(), ios.end(), [](const offload::Io& io) { return io.ready(); }))
    return false;
  const device::TraceRange range("wait for NVMe");
  for (offload::Io& io : ios) io.wait();
  ios.clear();
  return true;
}

bool UpdateBuffers::all_written(bool wait) {
  return std::all_of(uses_.begin(), uses_.end(), [&](Use& use) { return ended(use.writes, wait); });
}

void UpdateBuffers::drop() noexcept {
  for (Use& use : uses_) use = {};
}

}  // namespace sherd::engine

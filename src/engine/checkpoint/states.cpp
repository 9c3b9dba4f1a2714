#include "engine/checkpoint/states.h"

#include <algorithm>
#include <utility>

namespace sherd::engine {

using sharding::Segment;
using tensor::Tensor;

namespace {

/// The part of [begin, end) that one of `holders` writes, of those that hold it: whole blocks of 8 bits.
tensor::Range share_of(std::int64_t begin, std::int64_t end, std::int64_t holder, std::int64_t holders) {
  constexpr std::int64_t block = tensor::int8_block;
  const std::int64_t blocks = (std::max<std::int64_t>(0, end - begin) + block - 1) / block;
  const auto until = [&](std::int64_t parts) {
    return std::min(begin + blocks * parts / holders * block, std::max(begin, end));
  };
  return {until(holder), until(holder + 1)};
}

/// The part of a rank's own shard that is to be written here.
tensor::Range written_range(const Segment& segment, optim::OverReplicas over_replicas) {
  const sharding::RankGroups& groups = segment.groups();
  const std::int64_t begin = segment.own_begin(), end = segment.own_end();
  if (over_replicas == optim::OverReplicas::same) return share_of(begin, end, groups.holder(), groups.holders());
  const int copy = groups.copies ? groups.copies->rank() : 0,
            copies = groups.copies ? groups.copies->size() : 1;
  if (over_replicas == optim::OverReplicas::own) return share_of(begin, end, copy, copies);
  const Segment::Range served = segment.served();
  return share_of(std::max(begin, served.begin), std::min(end, served.end), copy, copies);
}

SavedState frozen_state(Segment& segment) {
  sharding::StateBuffer& buffer = segment.parameters();
  const bool own = segment.parameters_sharded(), int8 = segment.key().int8;
  return {"frozen",
          buffer.dtype(),
          own ? segment.own_begin() : 0,
          own ? segment.own_end() : segment.layout().padded(),
          [&buffer](std::int64_t at, const Tensor& to) { buffer.read(at, to).wait(); },
          [&segment, &buffer, int8](std::int64_t at, const Tensor& from) {
            int8 ? segment.write_values(at, from) : buffer.write(at, from).wait();
          }};
}

std::vector<SavedState> states_of(Segment& segment, Kinds kinds) {
  if (!segment.key().trainable) return {frozen_state(segment)};
  std::vector<SavedState> out{
      {"fp32", DType::f32, segment.update_begin(), segment.update_end(),
       [&segment](std::int64_t at, const Tensor& to) { segment.read_masters(at, to); },
       [&segment](std::int64_t at, const Tensor& from) { segment.write_values(at, from); },
       [&segment](std::int64_t at, std::int64_t count, sharding::FrozenMemory& memory) {
         return segment.freeze_masters(at, count, memory);
       }}};
  for (std::size_t i = 0; kinds == Kinds::all && i < segment.states().size(); ++i) {
    const optim::State& kept = segment.states()[i];
    const sharding::StateBuffer& buffer = segment.moments()[i];
    out.push_back({kept.name, kept.code == optim::Code::none ? buffer.dtype() : DType::f32, buffer.begin(),
                   buffer.end(),
                   [&segment, i](std::int64_t at, const Tensor& to) { segment.read_state(i, at, to); },
                   [&segment, i](std::int64_t at, const Tensor& from) { segment.write_state(i, at, from); },
                   [&segment, i](std::int64_t at, std::int64_t count, sharding::FrozenMemory& memory) {
                     return segment.freeze_state(i, at, count, memory);
                   },
                   kept.over_replicas});
  }
  return out;
}

}  // namespace

std::vector<SavedState> saved_states(Segment& segment, Kinds kinds) {
  std::vector<SavedState> out = states_of(segment, kinds);
  for (SavedState& state : out) {
    state.written = written_range(segment, state.over_replicas);
    state.replica = segment.groups().replica_index(), state.replicas = segment.groups().replicas();
  }
  return out;
}

std::string kind_of_replica(const std::string& kind, std::int64_t replica) {
  return cat(kind, "_", replica);
}

void in_chunks(device::Device& device, DType dtype, std::int64_t count,
               const std::function<void(std::int64_t, const Tensor&)>& visit) {
  const Tensor chunk = Tensor::empty(device, {std::min(most_at_once, count)}, dtype,
                                     device::Category::workspace, device.processor_tier());
  for (std::int64_t done = 0; done < count; done += most_at_once)
    visit(done, chunk.range(0, std::min(most_at_once, count - done)));
}

}  // namespace sherd::engine

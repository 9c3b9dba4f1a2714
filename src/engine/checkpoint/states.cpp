#include "engine/checkpoint/states.h"

#include <algorithm>
#include <utility>

namespace sherd::engine {

using sharding::Segment;
using tensor::Tensor;

namespace {

SavedState state_of(std::string kind, sharding::StateBuffer& buffer) {
  return {std::move(kind),
          buffer.dtype(),
          buffer.begin(),
          buffer.end(),
          [&buffer](std::int64_t at, const Tensor& to) { buffer.read(at, to).wait(); },
          [&buffer](std::int64_t at, const Tensor& from) { buffer.write(at, from).wait(); }};
}

}  // namespace

std::vector<SavedState> saved_states(Segment& segment, Kinds kinds) {
  if (!segment.key().trainable) return {state_of("frozen", segment.parameters())};
  std::vector<SavedState> out{
      {"fp32", DType::f32, segment.update_begin(), segment.update_end(),
       [&segment](std::int64_t at, const Tensor& to) { segment.read_masters(at, to); },
       [&segment](std::int64_t at, const Tensor& from) { segment.write_values(at, from); }}};
  for (std::size_t i = 0; kinds == Kinds::all && i < segment.states().size(); ++i)
    out.push_back(state_of(segment.states()[i].name, segment.moments()[i]));
  return out;
}

tensor::Range written_range(const Segment& segment) {
  const sharding::RankGroups& groups = segment.groups();
  const std::int64_t begin = segment.own_begin(), shard = segment.own_end() - begin;
  const std::int64_t index = groups.holder(), holders = groups.holders();
  return {begin + shard * index / holders, begin + shard * (index + 1) / holders};
}

void in_chunks(device::Device& device, DType dtype, std::int64_t count,
               const std::function<void(std::int64_t, const Tensor&)>& visit) {
  constexpr std::int64_t most = std::int64_t{1} << 20;
  const Tensor chunk = Tensor::empty(device, {std::min(most, count)}, dtype, device::Category::workspace,
                                     device.processor_tier());
  for (std::int64_t done = 0; done < count; done += most)
    visit(done, chunk.range(0, std::min(most, count - done)));
}

}  // namespace sherd::engine

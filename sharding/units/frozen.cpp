#include "sharding/units/frozen.h"

#include <cstring>
#include <memory>
#include <utility>

namespace sherd::sharding {

Tensor FrozenMemory::take(std::int64_t numel, DType dtype) {
  constexpr std::size_t alignment = 64;
  const std::size_t begin = used_;
  used_ += (static_cast<std::size_t>(numel) * size_of(dtype) + alignment - 1) / alignment * alignment;
  return counts() ? Tensor() : Tensor::view_of(storage_, begin, {numel}, dtype);
}

Frozen Frozen::of(device::Device& device, const Tensor& from, FrozenMemory& memory) {
  const Tensor to = memory.take(from.numel(), from.dtype());
  if (memory.counts()) return {};
  if (device.kind() == device::Kind::cpu) {
    // By all threads: training waits for this copy.
    device.arena().parallel_for(static_cast<std::int64_t>(to.bytes()), std::int64_t{1} << 20,
                                [&](std::int64_t begin, std::int64_t end) {
                                  std::memcpy(to.raw() + begin, from.raw() + begin,
                                              static_cast<std::size_t>(end - begin));
                                });
  } else {
    device.copy(to.raw(), from.raw(), to.bytes());
  }
  return {to, nullptr};
}

Frozen Frozen::of(device::Device& device, const StateBuffer& state, std::int64_t begin, std::int64_t count,
                  FrozenMemory& memory) {
  if (!state.stored()) return of(device, state.range(begin, begin + count), memory);
  memory.note_reading(count);
  if (memory.counts()) return {};
  const auto later = std::make_shared<offload::DeferredRead>(state.defer_read(begin, count));
  return {{}, [later](const Tensor& to, FrozenReading&) { later->start(to.raw()).wait(); }};
}

Tensor Frozen::in(const Tensor& to, FrozenReading& with) const {
  if (memory.defined()) return memory;
  read(to, with);
  return to;
}

}  // namespace sherd::sharding

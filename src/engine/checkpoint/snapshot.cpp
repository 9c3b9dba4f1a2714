#include "engine/checkpoint/background_save.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace sherd::engine {

using sharding::Frozen;
using sharding::FrozenMemory;
using sharding::Piece;
using tensor::Tensor;

namespace {

constexpr FilePart changing = FilePart::trained;

/// Calls visit(first, count) over `all` elements, most_at_once at a time.
template <class Visit>
void in_parts(std::int64_t all, const Visit& visit) {
  for (std::int64_t done = 0; done < all; done += most_at_once)
    visit(done, std::min(most_at_once, all - done));
}

/// The room that the other thread reads into, behind the copies.
struct ReadRoom {
  std::int64_t elements;
  std::size_t begin;  ///< in the block
  static std::size_t bytes(std::int64_t elements) {
    return static_cast<std::size_t>(elements) * (sizeof(float) + 2 * sizeof(std::uint16_t));
  }
  Tensor of(const device::Storage& storage, std::size_t skipped, std::int64_t count, DType dtype) const {
    return Tensor::view_of(storage, begin + skipped * static_cast<std::size_t>(elements), {count}, dtype);
  }
  Tensor joined(const device::Storage& storage, std::int64_t count, DType dtype) const {
    return of(storage, 0, count, dtype);
  }
  Tensor low(const device::Storage& storage) const { return of(storage, 4, elements, DType::u16); }
  Tensor high(const device::Storage& storage) const { return of(storage, 6, elements, DType::u16); }
};

FrozenMemory count(const sharding::ShardedModel& model) {
  FrozenMemory counting;
  for_each_tensor(model, changing,
                  [&](const FileTensor& tensor, const SavedState& state, const Piece& piece) {
                    in_parts(tensor.count, [&](std::int64_t done, std::int64_t elements) {
                      state.freeze(state.in_file(piece.flat_begin) + done, elements, counting);
                    });
                  });
  return counting;
}

}  // namespace

std::size_t Snapshots::bytes() const {
  const FrozenMemory counted = count(model_);
  return counted.bytes() + ReadRoom::bytes(counted.most_read());
}

void Snapshots::reserve() {
  const device::Ledger& ledger = device_.ledger();
  const std::uint64_t limit = ledger.limit(device::Tier::host), needed = memory_ ? 0 : bytes();
  // Kept from now on, it must leave room for what steps have held.
  if (const std::uint64_t held = ledger.peak(device::Tier::host);
      limit > 0 && needed > 0 && held + needed > limit)
    fail(ErrorKind::memory, needed, " bytes more than the ", held, " of the host tier so far are over ",
         "device.host_memory_limit, ", limit);
  if (!memory_) memory_ = device_.allocate(bytes(), device::Category::checkpoint, device::Tier::host);
  if (!arena_) arena_ = std::make_shared<Arena>(1);
}

std::vector<FileTensor> Snapshots::take() {
  reserve();
  const FrozenMemory counted = count(model_);
  const ReadRoom room{counted.most_read(), counted.bytes()};
  FrozenMemory memory(memory_);
  std::vector<FileTensor> out;
  for_each_tensor(model_, changing, [&](FileTensor tensor, const SavedState& state, const Piece& piece) {
    auto parts = std::make_shared<std::vector<Frozen>>();  // std::function copies what it holds
    in_parts(tensor.count, [&](std::int64_t done, std::int64_t elements) {
      parts->push_back(state.freeze(state.in_file(piece.flat_begin) + done, elements, memory));
    });
    tensor.elements = [parts, room, arena = arena_, storage = memory_, count = tensor.count,
                       dtype = state.dtype](const FileTensor::Put& put) {
      const bool reads = room.elements > 0;
      sharding::FrozenReading with(*arena, reads ? room.low(storage) : Tensor(),
                                   reads ? room.high(storage) : Tensor());
      for (std::int64_t done = 0; Frozen & part : *parts) {
        const std::int64_t elements = std::min(most_at_once, count - done);
        put(done, part.memory.defined() ? part.memory : part.in(room.joined(storage, elements, dtype), with));
        part = {};
        done += elements;
      }
    };
    out.push_back(std::move(tensor));
  });
  device_.synchronize();
  return out;
}

}  // namespace sherd::engine

// Elements go one by one here, so this is compiled with some of the optimiser (tests/CMakeLists.txt).
#include "support/logical_states.h"

#include <algorithm>
#include <cstring>

namespace sherd::test {
namespace {

/// The indices that a slice holds, by axis.
using Indices = std::vector<std::vector<std::int64_t>>;

Indices indices_of(const tensor::Slice& slice) {
  Indices out;
  for (const auto& ranges : slice.blocks()) {
    out.emplace_back();
    for (const tensor::Range& range : ranges)
      for (std::int64_t i = range.begin; i < range.end; ++i) out.back().push_back(i);
  }
  return out;
}

std::int64_t logical_index(const tensor::Slice& slice, const Indices& indices, std::int64_t local) {
  std::int64_t logical = 0, stride = 1;
  for (int axis = slice.logical().rank() - 1; axis >= 0; --axis) {
    const std::vector<std::int64_t>& held = indices[static_cast<std::size_t>(axis)];
    const std::int64_t extent = std::ssize(held);
    logical += held[static_cast<std::size_t>(local % extent)] * stride;
    local /= extent;
    stride *= slice.logical()[axis];
  }
  return logical;
}

}  // namespace

LogicalStates LogicalStateCollector::take() {
  for (const auto& [name, seen] : seen_)
    require(std::find(seen.begin(), seen.end(), 0) == seen.end(), "no rank has all of ", name);
  seen_.clear();
  return std::move(states_);
}

void LogicalStateCollector::add(const sharding::Segment& segment, const std::string& kind, std::int64_t begin,
                                const tensor::Tensor& values) {
  const std::size_t size = size_of(values.dtype());
  const std::lock_guard lock(mutex_);
  for (const sharding::Piece& piece : segment.layout().pieces(begin, begin + values.numel())) {
    const autograd::Parameter& parameter = *segment.layout().parameters()[piece.slot];
    const std::string name = kind + "." + parameter.name;
    const tensor::Slice slice = parameter.logical_slice();
    const auto numel = static_cast<std::size_t>(slice.logical().numel());
    states_[name].resize(numel * size);
    std::vector<char>& seen = seen_[name];
    seen.resize(numel);
    std::byte* const to = states_[name].data();
    const Indices indices = indices_of(slice);
    for (std::int64_t i = 0; i < piece.count;
         ++i) {  // by element, not by run: whoever tests Slice needs another way
      const auto at = static_cast<std::size_t>(logical_index(slice, indices, piece.parameter_begin + i));
      const std::byte* from = values.raw() + static_cast<std::size_t>(piece.flat_begin - begin + i) * size;
      require(!seen[at] || std::memcmp(to + at * size, from, size) == 0, "replicas of ", name,
              " differ, at element ", at);
      std::memcpy(to + at * size, from, size);
      seen[at] = 1;
    }
  }
}

}  // namespace sherd::test

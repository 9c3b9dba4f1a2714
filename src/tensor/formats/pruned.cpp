#include "tensor/formats/pruned.h"

#include "base/error.h"

namespace sherd::tensor {
namespace {

/// Weights are compared by this: magnitudes as integers, a pruned one's below all.
std::int64_t rank_of(float weight) {
  const auto bits = std::bit_cast<std::uint32_t>(weight);
  return bits == pruned_bits<std::uint32_t> ? -1 : static_cast<std::int64_t>(bits & 0x7fffffffu);
}

constexpr std::int64_t least_normal = 0x00800000;

}  // namespace

void prune_two_of_four(std::span<float> weights) {
  require(weights.size() % pruned_group == 0, "prune_two_of_four: ", weights.size(), " weights are no fours");
  for (std::size_t first = 0; first < weights.size(); first += pruned_group) {
    float* four = weights.data() + first;
    std::int64_t ranks[pruned_group];
    for (int i = 0; i < pruned_group; ++i) ranks[i] = rank_of(four[i]);
    for (int i = 0; i < pruned_group; ++i) {
      int ahead = 0;  // weights that stay rather than this one
      for (int j = 0; j < pruned_group; ++j) ahead += ranks[j] > ranks[i] || (ranks[j] == ranks[i] && j < i);
      if (ahead >= pruned_group / 2)
        four[i] = -0.0f;
      else if (ranks[i] < least_normal)  // a negative one would round to −0
        four[i] = 0.0f;
    }
  }
}

void keep_unpruned(std::span<const float> from, std::span<std::uint16_t> rounded) {
  require(from.size() == rounded.size(), "keep_unpruned: ", from.size(), " weights, and ", rounded.size(),
          " rounded ones");
  for (std::size_t i = 0; i < from.size(); ++i)
    if (rounded[i] == pruned_bits<std::uint16_t> && !is_pruned(from[i])) rounded[i] = 0;
}

}  // namespace sherd::tensor

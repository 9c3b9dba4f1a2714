#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

// 2:4 sparsity (Mishra et al. 2021, "Accelerating sparse deep neural networks", arXiv:2104.08378): of each
// four neighbours along the inputs of an output two are pruned, which is what sparse tensor cores from
// NVIDIA's A100 on skip.
//
// A pruned weight is stored as −0, and no other weight of a pruned matrix is: one that happens to be 0 is +0.
// So every copy of a weight, whole or a shard, in memory or in files, in fp32, bf16 or fp16, says whether it
// is pruned, and there is no mask beside it.
namespace sherd::tensor {

/// The neighbours of which half are pruned.
inline constexpr std::int64_t pruned_group = 4;

/// −0 as the bits of a floating type that has so many.
template <class Bits>
inline constexpr Bits pruned_bits = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));

inline bool is_pruned(float weight) {
  return std::bit_cast<std::uint32_t>(weight) == pruned_bits<std::uint32_t>;
}

/// Makes the two of least magnitude of each four weights −0, and zeros and denormals among the others +0. Of
/// equal ones, what is −0 already goes first, then the last: weights that are pruned keep their pattern. NaN
/// counts as the largest. Throws Error{usage} unless there are fours only.
void prune_two_of_four(std::span<float> weights);

/// Weights that were rounded to 16 bits, `from` as they were before: what has become −0 and was not pruned is
/// made +0. Both in order.
void keep_unpruned(std::span<const float> from, std::span<std::uint16_t> rounded);

}  // namespace sherd::tensor

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"

// Parts of a weight with which LoRA's products can begin.
namespace sherd::models {

/// b·a, of rank r: a [r, in], b [out, r].
struct WeightPart {
  std::vector<float> a, b;
};

/// The part of the `rank` largest singular values of `weight`, [out, in], both factors with their roots
/// (Meng et al. 2024, "PiSSA", eq. 2 and 3). Found by block Lanczos iterations from a fixed start until the
/// triplets are right to what fp32 holds, or the subspace is all there is. rank: at most the smaller extent.
/// `processor`: a CPU device.
WeightPart largest_part(std::span<const float> weight, std::int64_t out, std::int64_t in, std::int64_t rank,
                        device::Device& processor);

/// Q's first `rank` columns and R's first rows of weight = Q·R, with the signs of Householder's reflections
/// as LAPACK has them (Büyükakyüz 2024, "OLoRA", algorithm 1). rank: at most the smaller extent.
WeightPart orthogonal_part(std::span<const float> weight, std::int64_t out, std::int64_t in,
                           std::int64_t rank, device::Device& processor);

}  // namespace sherd::models

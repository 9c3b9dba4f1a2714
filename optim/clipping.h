#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/error.h"

namespace sherd::optim {

/// The factor by which clipping to `max_norm` multiplies gradients of the given global L2 norm: min(1,
/// max_norm/(norm + 1e-6)); 1 when max_norm ≤ 0 (off). `norm` is that of the true gradients, without loss
/// scale (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013; the 1e-6 as in
/// Megatron and DeepSpeed).
inline double clip_factor(double norm, double max_norm) {
  if (max_norm <= 0) return 1.0;
  return 1.0 / std::max(1.0, (norm + 1e-6) / max_norm);
}

/// The one factor that undoes the loss scale and clips: 1/(loss_scale·max(1, (norm + 1e-6)/max_norm)).
/// `loss_scale` is the one that the gradients were made with. Throws Error{usage} for a norm that is not
/// finite: such a step is skipped.
inline double gradient_factor(double norm, double loss_scale, double max_norm) {
  require(std::isfinite(norm) && loss_scale > 0, "gradient_factor: norm ", norm, ", loss scale ", loss_scale);
  return clip_factor(norm, max_norm) / loss_scale;
}

/// How the average over N micro-batches comes about: each one's backward starts from `seed` times the weight
/// of its loss, the gradients are added up, and the update multiplies their sum by rest(), once it knows what
/// all weigh together. The seed is a power of two, so that a micro-batch's gradients have the same bits
/// whatever N is, and small enough that sums in fp16 overflow no sooner than averages, but for a factor of
/// two.
struct AverageScale {
  double seed = 1;  ///< 2^−⌊log2 N⌋
  /// 1/(seed·weight), for weights of sum `weight`: N where each is 1.
  double rest(double weight) const { return 1 / seed / weight; }

  static AverageScale over(std::int64_t micro_batches) {
    require(micro_batches > 0, "an average over ", micro_batches, " micro-batches");
    return {1 / static_cast<double>(std::bit_floor(static_cast<std::uint64_t>(micro_batches)))};
  }
};

}  // namespace sherd::optim

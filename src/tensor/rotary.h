#pragma once

#include <cmath>
#include <cstdint>

#include "base/choices.h"

// The angles of rotary positions, written once for processors and GPUs.

#if defined(__CUDACC__)
#define SHERD_ROTARY __host__ __device__ inline
#else
#define SHERD_ROTARY inline
#endif

namespace sherd::tensor {

/// Rotary positions (Su et al. 2021): pair i of a head of 2·half elements is turned by position·frequency(i),
/// and multiplied by attention_scale(). The numbers are those of Hugging Face's transformers for a
/// `rope_scaling` with the same values, in double instead of fp32.
struct Rotary {
  double base = 10000;  ///< `rope_theta`; above 0, with yarn above 1
  double share = 1;     ///< of a head's elements, the first ones, that turn (`partial_rotary_factor`); (0, 1]
  RotaryScaling scaling = RotaryScaling::none;
  double factor = 1;  ///< above 0; not with none
  /// llama3: wave lengths above original_positions/low_freq_factor are divided, those below
  /// original_positions/high_freq_factor kept.
  double low_freq_factor = 1, high_freq_factor = 4;
  /// yarn: how often the pairs turn within original_positions between which the ramp lies.
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;                 ///< yarn: the ramp begins and ends at whole pairs
  std::int64_t original_positions = 0;  ///< `original_max_position_embeddings`; llama3 and yarn
  /// Queries at position p are multiplied by 1 + query_beta·ln(1 + ⌊p/query_positions⌋) (Llama 4's and
  /// Ministral 3's `llama_4_scaling_beta`). Not where only a share of a head turns.
  double query_beta = 0;
  std::int64_t query_positions = 0;  ///< above 0 where query_beta is not 0
  double attention_factor = 0;       ///< 0: with yarn 0.1·ln(factor) + 1, or 1 up to a factor of 1; else 1

  bool operator==(const Rotary&) const = default;
};

/// The elements of a head that turn: transformers' int(head·share).
constexpr std::int64_t rotary_size(const Rotary& r, std::int64_t head) {
  return static_cast<std::int64_t>(static_cast<double>(head) * r.share);
}

/// Throws Error{usage} that names the value which makes no angles.
void check(const Rotary& rotary);

/// The factor of cosines and sines, of queries and of keys.
SHERD_ROTARY double attention_scale(const Rotary& r) {
  if (r.attention_factor != 0) return r.attention_factor;
  return r.scaling == RotaryScaling::yarn && r.factor > 1 ? 0.1 * std::log(r.factor) + 1 : 1;
}

/// The factor of queries at a position.
SHERD_ROTARY double query_scale(const Rotary& r, std::int64_t position) {
  if (r.query_beta == 0) return 1;
  return 1 + r.query_beta * std::log(1 + static_cast<double>(position / r.query_positions));
}

/// The share of pair i that yarn divides: 0 for pairs that turn more than beta_fast times within the original
/// positions, 1 for those that turn less than beta_slow times.
SHERD_ROTARY double yarn_ramp(const Rotary& r, std::int64_t i, std::int64_t half) {
  constexpr double two_pi = 6.283185307179586;
  const double dim = 2.0 * static_cast<double>(half), positions = static_cast<double>(r.original_positions);
  double low = dim * std::log(positions / (r.beta_fast * two_pi)) / (2 * std::log(r.base));
  double high = dim * std::log(positions / (r.beta_slow * two_pi)) / (2 * std::log(r.base));
  if (r.truncate) low = std::floor(low), high = std::ceil(high);
  low = low > 0 ? low : 0, high = high < dim - 1 ? high : dim - 1;
  if (low == high) high += 0.001;
  const double ramp = (static_cast<double>(i) - low) / (high - low);
  return ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
}

/// Radians per position of pair i of `half`.
SHERD_ROTARY double rotary_frequency(const Rotary& r, std::int64_t i, std::int64_t half) {
  constexpr double two_pi = 6.283185307179586;
  const double own = std::pow(r.base, -static_cast<double>(i) / static_cast<double>(half));
  switch (r.scaling) {
    case RotaryScaling::none:
      return own;
    case RotaryScaling::linear:
      return own / r.factor;
    case RotaryScaling::llama3: {
      const double turns = static_cast<double>(r.original_positions) * own / two_pi;
      const double kept = (turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
      return kept <= 0 ? own / r.factor : kept >= 1 ? own : (1 - kept) * own / r.factor + kept * own;
    }
    case RotaryScaling::yarn: {
      const double divided = yarn_ramp(r, i, half);
      return own / r.factor * divided + own * (1 - divided);
    }
  }
  return own;
}

}  // namespace sherd::tensor

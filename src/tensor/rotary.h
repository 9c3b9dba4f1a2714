#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/choices.h"

// The angles of rotary positions.

#if defined(__CUDACC__)
#define SHERD_ROTARY __host__ __device__ inline
#else
#define SHERD_ROTARY inline
#endif

namespace sherd::tensor {

/// A number for each pair of a head; copies share them.
struct PairFactors {
  std::shared_ptr<const std::vector<double>> values;  ///< null: none
  bool operator==(const PairFactors& other) const {
    return values == other.values || (values && other.values && *values == *other.values);
  }
};

/// Rotary positions (Su et al. 2021): pair i of a head of 2·half elements is turned by position·frequency(i),
/// and multiplied by attention_scale(). The numbers are those of Hugging Face's transformers for a
/// `rope_scaling` with the same values, in double instead of fp32.
struct Rotary {
  double base = 10000;  ///< `rope_theta`; above 0, with yarn above 1
  double share = 1;     ///< of a head's elements, the first ones, that turn (`partial_rotary_factor`); (0, 1]
  RotaryScaling scaling = RotaryScaling::none;
  double factor = 1;  ///< above 0; linear, llama3 and yarn
  /// llama3: wave lengths above original_positions/low_freq_factor are divided, those below
  /// original_positions/high_freq_factor kept.
  double low_freq_factor = 1, high_freq_factor = 4;
  /// yarn: how often the pairs turn within original_positions between which the ramp lies.
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;                 ///< yarn: the ramp begins and ends at whole pairs
  std::int64_t original_positions = 0;  ///< `original_max_position_embeddings`; llama3 and yarn
  PairFactors factors{};                ///< longrope: by which frequencies are divided, above 0
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
double attention_scale(const Rotary& rotary);

/// The factor of queries at a position, of Rotary::query_beta and query_positions; for processors and GPUs.
SHERD_ROTARY double query_scale(double beta, std::int64_t positions, std::int64_t position) {
  return beta == 0 ? 1 : 1 + beta * std::log(1 + static_cast<double>(position / positions));
}

/// Radians per position of each of `half` pairs. Throws Error{usage} where longrope has factors for others.
std::vector<double> rotary_frequencies(const Rotary& rotary, std::int64_t half);

}  // namespace sherd::tensor

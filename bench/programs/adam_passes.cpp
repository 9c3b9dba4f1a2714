#include "bench/programs/adam_passes.h"

#include <bit>
#include <cmath>

namespace sherd::bench {

#define SHERD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))

SHERD_CLONES void upcast(const std::uint16_t* __restrict from, float* __restrict to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i)
    to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16);
}

SHERD_CLONES double sum_of_squares(const float* x, std::int64_t n) {
  float sums[64] = {};
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 64; ++k) sums[k] += x[i + k] * x[i + k];
  double total = 0;
  for (const float sum : sums) total += static_cast<double>(sum);
  for (; i < n; ++i) total += static_cast<double>(x[i] * x[i]);
  return total;
}

SHERD_CLONES void scale(float* x, float factor, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] *= factor;
}

SHERD_CLONES void round_to_16(const float* __restrict from, std::uint16_t* __restrict to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i)
    to[i] = static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(from[i]) + 0x8000u) >> 16);
}

SHERD_CLONES void adam_pass(const bench::OptimizerStreams& s, const AdamConstants& c, std::int64_t begin,
                            std::int64_t end) {
  float* __restrict p = s.p, * __restrict m = s.m, * __restrict v = s.v;
  const float* __restrict g = s.g;
  const AdamConstants k = c;
  for (std::int64_t i = begin; i < end; ++i) {
    const float first = k.beta1 * m[i] + (1 - k.beta1) * g[i];
    const float second = k.beta2 * v[i] + (1 - k.beta2) * (g[i] * g[i]);
    m[i] = first, v[i] = second;
    p[i] = p[i] - k.decay * p[i] - k.step_size * (first / (std::sqrt(second) * k.root_scale + k.eps));
  }
}

}  // namespace sherd::bench

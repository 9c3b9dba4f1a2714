#pragma once

#include <cstdint>

// How loops go from codes of the dynamic map (optim/quantized.h) to values and back. Plain declarations only,
// see tensor/cpu/isa/tables.h.

namespace sherd::optim {

/// Blocks with a smaller scale are zeros: it would have no reciprocal.
inline constexpr float least_scale = 0x1p-120f;

/// A magnitude of the map has a number k: 2^L + f for part f of the decade that is divided into 2^L parts, so
/// that the highest bit of k tells the decade, in which values are evenly spaced: base + slope·k. One more
/// power of two stands for 1. Signed codes are 127 ± k, where k = 0 stands for 0; unsigned ones are k - 1,
/// where k = 1 does.
///
/// Levels count what the magnitude of a number may be near: 0, the seven decades, 1.
struct DynamicMap {
  static constexpr int levels = 9;
  alignas(64) float base[16], slope[16];  ///< by the number of leading zeros of k, modulo 16
  /// By the exponent of fp32 modulo 32, from 2⁻³¹ to 1: where the level after that of its smallest number
  /// begins, if that is among its numbers; else NaN. The last four bits are the level of the smallest one.
  alignas(64) float next_level[32];
  /// By level: k of a magnitude is inverse·magnitude + offset, rounded to nearest, and at most `top`; k - 1,
  /// the code, where there are no signs. There a number above 0 whose code would be 0 takes 1.
  alignas(64) float inverse[16], offset[16], top[16];
  float begin[levels];  ///< where each level does
  std::int32_t middle;  ///< the code of k = 0
  bool has_signs;
  alignas(64) float values[256];
};

}  // namespace sherd::optim

#pragma once

#include <cstdint>

namespace sherd::tensor {

/// The activation of a gated linear unit's gate: act(gate)·up (Shazeer 2020, "GLU variants improve
/// transformer").
enum class Glu : std::uint8_t {
  swiglu,      ///< silu(gate) = gate·sigmoid(gate)
  geglu_tanh,  ///< Activation::gelu_tanh
  geglu_erf,   ///< Activation::gelu_erf
  /// GPT-OSS's: g·sigmoid(α·g)·(u + 1) with g = min(gate, limit) and u = up within [-limit, limit]
  swiglu_clamped
};
inline constexpr double clamped_glu_limit = 7, clamped_glu_alpha = 1.702;

}  // namespace sherd::tensor

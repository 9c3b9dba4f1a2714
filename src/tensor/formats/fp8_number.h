#pragma once

#include <bit>
#include <cstdint>

namespace sherd::tensor {

/// Single numbers for the formulas of fp8_code.h.
struct Fp8Number {
  using F = float;
  using U = std::uint32_t;
  using I = std::int32_t;
  static U bits(F f) { return std::bit_cast<U>(f); }
  static F value(U u) { return std::bit_cast<F>(u); }
};

}  // namespace sherd::tensor

#include <immintrin.h>

// For this file alone: a processor with AVX-512 may lack AVX512-BF16.
#if defined(SHERD_ISA_avx512)
#define SHERD_BF16_PRODUCTS
#pragma GCC target("avx512bf16")

#include "tensor/cpu/isa/gemm.h"
#include "tensor/cpu/isa/tiles.h"

namespace sherd::tensor::cpu::avx512 {
namespace {

/// Units of the inner extent that are taken at a time, so that the rows of a and the sums stay in the second-level cache.
constexpr Count max_units = 768;

void pack_rows(const void* b, Count stride, Count units, Count cols, void* packed) {
  const auto* from = static_cast<const std::uint32_t*>(b);
  auto* to = static_cast<std::uint32_t*>(packed);
  for (Count c = 0; c < cols; c += sliver, to += units * sliver)
    transpose_units(from + c * stride, stride, cols - c < sliver ? cols - c : sliver, units, to, sliver, sliver);
}

void pack(const void* b, Count stride, Count inner, Count cols, void* packed) {
  pack_columns<DotBf16>(static_cast<const std::uint16_t*>(b), stride, inner, cols,
                        static_cast<std::uint32_t*>(packed));
}

void multiply(const void* a, Count a_stride, Count rows, const void* packed, Count units, Count cols, float* c,
              Count c_stride) {
  const auto* left = static_cast<const std::uint32_t*>(a);
  const auto* right = static_cast<const std::uint32_t*>(packed);
  const Count parts = (units + max_units - 1) / max_units, part = (units + parts - 1) / parts;
  for (Count first = 0; first < units; first += part)
    for (Count col = 0; col < cols; col += sliver)
      multiply_sliver<DotBf16>(left + first, a_stride, rows, right + (col * units + first * sliver),
                               units - first < part ? units - first : part, c + col, c_stride, first > 0);
}

}  // namespace

const GemmOps gemm_bf16 = {sliver, pack_rows, pack, multiply};

}  // namespace sherd::tensor::cpu::avx512
#endif

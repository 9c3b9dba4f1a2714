#include <immintrin.h>

// For this file alone: a processor with AVX-512 may lack AVX512-BF16.
#if defined(SHERD_ISA_avx512)
#define SHERD_BF16_PRODUCTS
#pragma GCC target("avx512bf16")

#include "tensor/cpu/isa/gemm.h"
#include "tensor/cpu/isa/tiles.h"

namespace sherd::tensor::cpu::avx512 {
namespace {

void pack_rows(const void* b, Count stride, Count units, Count cols, void* packed) {
  const auto* from = static_cast<const std::uint32_t*>(b);
  auto* to = static_cast<std::uint32_t*>(packed);
  for (Count c = 0; c < cols; c += sliver, to += units * sliver)
    transpose_units(from + c * stride, stride, cols - c < sliver ? cols - c : sliver, units, to, sliver,
                    sliver);
}

void pack(const void* b, Count stride, Count inner, Count cols, void* packed, Count sliver_units) {
  pack_columns<DotBf16>(static_cast<const std::uint16_t*>(b), stride, inner, cols,
                        static_cast<std::uint32_t*>(packed), sliver_units);
}

/// One sliver's sums on their way through memory. What a tile is added to is asked for when it begins and
/// read when it ends, so that nobody waits for a cache.
struct Partial {
  float* c;
  Count stride;
  bool add;

  SHERD_INLINE F begin(Count row, int part) const {
    __builtin_prefetch(c + row * stride + part * lanes, 1);
    return F{};
  }
  SHERD_INLINE void end(Count row, F first, F second) const {
    float* to = c + row * stride;
    if (add) first = load(to) + first, second = load(to + lanes) + second;
    store(to, first), store(to + lanes, second);
  }
};

/// One sliver's sums on their way to the result.
struct Finished {
  const float* c;
  Count c_stride;
  bool add;
  const GemmFinish& finish;
  Count col, cols;  ///< of the result; the sliver may be wider

  SHERD_INLINE F begin(Count row, int part) const {
    if (add) __builtin_prefetch(c + row * c_stride + part * lanes);
    const Count at = row * finish.out_stride + col + part * lanes;
    if (finish.wide)
      __builtin_prefetch(static_cast<float*>(finish.out) + at, 1);
    else if (part == 0)
      __builtin_prefetch(static_cast<Bf16*>(finish.out) + at, 1);
    return F{};
  }

  SHERD_INLINE void end(Count row, F first, F second) const {
    if (add) first = load(c + row * c_stride) + first, second = load(c + row * c_stride + lanes) + second;
    if (finish.folds) round_alone(first, second);
    if (finish.bias)
      first = first + load(finish.bias + col), second = second + load(finish.bias + col + lanes);
    const Count at = row * finish.out_stride + col;
    if (finish.wide)
      write(static_cast<float*>(finish.out) + at, first, second);
    else
      write(static_cast<Bf16*>(finish.out) + at, first, second);
  }

 private:
  /// What the product would be apart, as bf16.
  SHERD_INLINE void round_alone(F& first, F& second) const {
    if (finish.wide) {
      first = (F)(round_to_bf16(first) & 0xffff0000u), second = (F)(round_to_bf16(second) & 0xffff0000u);
    } else {
      Bf16 alone[sliver];
      store_as(alone, DotBf16::round(first, second));
      first = load(alone), second = load(alone + lanes);
    }
  }

  template <class S>
  SHERD_INLINE void write(S* out, F first, F second) const {
    if (cols - col < sliver) [[unlikely]]
      return write_last(out, first, second);
    if (finish.accumulate) first = load(out) + first, second = load(out + lanes) + second;
    store_whole(out, first, second);
  }

  template <class S>
  [[gnu::noinline]] void write_last(S* out, F first, F second) const {
    S sliver_of_out[sliver] = {};
    const auto bytes = static_cast<std::size_t>(cols - col) * sizeof(S);
    if (finish.accumulate) {
      __builtin_memcpy(sliver_of_out, out, bytes);
      first = load(sliver_of_out) + first, second = load(sliver_of_out + lanes) + second;
    }
    store_whole(sliver_of_out, first, second);
    __builtin_memcpy(out, sliver_of_out, bytes);
  }

  SHERD_INLINE void store_whole(float* out, F first, F second) const {
    store(out, first), store(out + lanes, second);
  }
  SHERD_INLINE void store_whole(Bf16* out, F first, F second) const {
    store_as(out, DotBf16::round(first, second));
  }
};

template <class FirstLeft, class Left>
void multiply_by(const FirstLeft& first_left, const Left& left, Count rows, const void* packed,
                 const GemmPart& part, Count cols, float* c, Count c_stride, const GemmFinish* finish) {
  for (Count col = 0; col < cols; col += sliver) {
    const auto* b = static_cast<const std::uint32_t*>(packed) + (col * part.units + part.first * sliver);
    float* sums = c ? c + col : nullptr;
    const auto by = [&](const auto& a) {
      if (finish)
        multiply_rows<DotBf16>(a, rows, b, part.count,
                               Finished{sums, c_stride, part.add, *finish, col, cols});
      else
        multiply_rows<DotBf16>(a, rows, b, part.count, Partial{sums, c_stride, part.add});
    };
    col == 0 ? by(first_left) : by(left);
  }
}

void multiply(const void* a, Count a_stride, Count rows, const void* packed, const GemmPart& part, Count cols,
              float* c, Count c_stride, const GemmFinish* finish) {
  const auto* from = static_cast<const std::uint32_t*>(a);
  const LeftRows left{from, a_stride};
  const LeftSlivers slivers{from, part.count};
  if (a_stride == 0)
    multiply_by(slivers, slivers, rows, packed, part, cols, c, c_stride, finish);
  else
    multiply_by(FirstLeftRows{left}, left, rows, packed, part, cols, c, c_stride, finish);
}

}  // namespace

const GemmOps gemm_bf16 = {sliver, pack_rows, pack, multiply};

}  // namespace sherd::tensor::cpu::avx512
#endif

#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"
#include "tensor/formats/fp8_code.h"
#include "tensor/formats/stored_code.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

#if defined(SHERD_ISA_avx512)
SHERD_INLINE F widen_codes(const std::int8_t* from) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (F)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, codes));
}
#else
SHERD_INLINE F widen_codes(const std::int8_t* from) {
  using Codes = std::int8_t __attribute__((vector_size(lanes)));
  return __builtin_convertvector(__builtin_convertvector(load_as<Codes>(from), I), F);
}
#endif

/// Numbers from 0 to 15, one a lane, out of halves of bytes; `upper_first`: a byte's upper half comes first.
template <bool upper_first>
SHERD_INLINE U half_bytes(const std::uint8_t* from) {
  constexpr std::uint32_t first = upper_first ? 4 : 0, second = 4 - first;
  U words, shifts;
#if defined(SHERD_ISA_avx512)
  const U eight = (U)_mm512_set1_epi64(load_as<long long>(from));
  words = __builtin_shuffle(eight, U{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
#elif defined(SHERD_ISA_avx2)
  words = all(load_as<std::uint32_t>(from));
#else
  words = all(std::uint32_t{load_as<std::uint16_t>(from)});
#endif
  for (int k = 0; k < lanes; ++k)
    shifts[k] = static_cast<std::uint32_t>(k % 8 / 2 * 8) + (k % 2 == 0 ? first : second);
  return (words >> shifts) & 15u;
}

/// A table of 16 numbers that lanes look into.
struct SixteenValues {
#if defined(SHERD_ISA_avx512)
  explicit SixteenValues(const float* from) : all_(load_as<F>(from)) {}
  SHERD_INLINE F at(U places) const {
    return (F)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)places, (__m512)all_);
  }

 private:
  F all_;
#elif defined(SHERD_ISA_avx2)
  explicit SixteenValues(const float* from) : low_(load_as<F>(from)), high_(load_as<F>(from + 8)) {}
  SHERD_INLINE F at(U places) const {
    const F low = (F)_mm256_permutevar8x32_ps((__m256)low_, (__m256i)places);
    const F high = (F)_mm256_permutevar8x32_ps((__m256)high_, (__m256i)places);
    return (I)places > 7 ? high : low;
  }

 private:
  F low_, high_;
#else
  explicit SixteenValues(const float* from) : from_(from) {}
  F at(U places) const {
    F out;
    for (int k = 0; k < lanes; ++k) out[k] = from_[places[k]];
    return out;
  }

 private:
  const float* from_;
#endif
};

/// Registers for tensor/formats/fp8_code.h.
struct Fp8Registers {
  using F = SHERD_ISA::F;
  using U = SHERD_ISA::U;
  using I = SHERD_ISA::I;
  SHERD_INLINE static U bits(F f) { return (U)f; }
  SHERD_INLINE static F value(U u) { return (F)u; }
};

using Codes8 = std::uint8_t __attribute__((vector_size(lanes)));
#if defined(SHERD_ISA_avx512)
SHERD_INLINE U widen(Codes8 codes) {
  return (U)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)codes);
}
SHERD_INLINE Codes8 narrow_to_bytes(U u) {
  return (Codes8)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)u);
}
#else
SHERD_INLINE U widen(Codes8 codes) {
  return __builtin_convertvector(codes, U);
}
SHERD_INLINE Codes8 narrow_to_bytes(U u) {
  return __builtin_convertvector(u, Codes8);
}
#endif

template <class S>
struct ConvertLoops {
  static const S* in(const void* x) { return static_cast<const S*>(x); }
  static S* out(void* x) { return static_cast<S*>(x); }

  static void load_(const void* x, float* y, Count n) {
    map([](F u) { return u; }, n, y, in(x));
  }
  static void store_(const float* x, void* y, Count n) {
    map([](F u) { return u; }, n, out(y), x);
  }
  static void add_to(const void* x, float* sum, Count n) {
    map([](F s, F u) { return s + u; }, n, sum, static_cast<const float*>(sum), in(x));
  }
  static void accumulate(const float* x, void* y, Count n) {
    map([](F o, F u) { return o + u; }, n, out(y), in(y), x);
  }
  static void blend(const void* x, float factor, float* sum, float keep, Count n) {
    map([=](F s, F u) { return s * keep + u * factor; }, n, sum, static_cast<const float*>(sum), in(x));
  }

  SHERD_INLINE static SumD8 block(const S* x) {
    SumD8 sum;
#pragma GCC unroll 16
    for (int k = 0; k < 64; k += lanes) add_squares(load(x + k), k, sum);
    return sum;
  }

  static void block_squares(const void* x, double* sums, Count n) {
    Count i = 0;
    for (; i + 64 * sums_at_once <= n; i += 64 * sums_at_once, sums += sums_at_once) {
      SumD8 several[sums_at_once];
#pragma GCC unroll 8
      for (int b = 0; b < sums_at_once; ++b) several[b] = block(in(x) + i + 64 * b);
      store_totals(several, sums);
    }
    for (; i + 64 <= n; i += 64) *sums++ = block(in(x) + i).total();
    if (i == n) return;
    float rest[64] = {};
    load_(in(x) + i, rest, n - i);
    SumD8 sum;
    for (int k = 0; k < 64; k += lanes) add_squares(load(rest + k), k, sum);
    *sums = sum.total();
  }

  static double squared_difference(const void* x, const void* y, Count n) {
    SumD8 sum;
    Count i = 0;
    for (; i + 32 <= n; i += 32) {
#pragma GCC unroll 8
      for (int k = 0; k < 32; k += lanes) add_squares(load(in(x) + i + k) - load(in(y) + i + k), k, sum);
    }
    float rest[32] = {};
    map([](F u, F v) { return u - v; }, n - i, rest, in(x) + i, in(y) + i);
    for (int k = 0; k < 32; k += lanes) add_squares(load(rest + k), k, sum);
    return sum.total();
  }

  static void from_int8(const void* blocks, void* y, Count count) {
    const auto* from = static_cast<const std::int8_t*>(blocks);
    for (S* to = out(y); count > 0; --count, from += int8_block_bytes, to += int8_block) {
      float scale;
      __builtin_memcpy(&scale, from + int8_block, sizeof scale);
#pragma GCC unroll 16
      for (Count k = 0; k < int8_block; k += lanes) store(to + k, widen_codes(from + k) * all(scale));
    }
  }

  static void from_four_bits(const float* table, const std::uint8_t* codes, Count stride, const void* scales,
                             Count scale_stride, void* y, Count count) {
    const SixteenValues values(table);
    const auto* scale = static_cast<const char*>(scales);
    for (S* to = out(y); count > 0; --count, codes += stride, scale += scale_stride, to += four_bit_block) {
      float factor;
      __builtin_memcpy(&factor, scale, sizeof factor);
#pragma GCC unroll 16
      for (Count k = 0; k < four_bit_block; k += lanes)
        store(to + k, values.at(half_bytes<true>(codes + k / 2)) * all(factor));
    }
  }

  static void from_mxfp4(const void* blocks, void* y, Count count) {
    const SixteenValues values(mxfp4_values);
    const auto* from = static_cast<const std::uint8_t*>(blocks);
    for (S* to = out(y); count > 0; --count, from += mxfp4_block_bytes, to += mxfp4_block) {
      const F scale = (F)all(static_cast<std::uint32_t>(from[mxfp4_codes]) << 23);
#pragma GCC unroll 8
      for (Count k = 0; k < mxfp4_block; k += lanes)
        store(to + k, values.at(half_bytes<false>(from + k / 2)) * scale);
    }
  }

  /// body(elements, how many of them) for registers of x, the last one's other lanes being zero.
  template <class Body>
  SHERD_INLINE static void for_registers(const void* x, Count n, Body body) {
    Count i = 0;
    for (; i + lanes <= n; i += lanes) body(load(in(x) + i), i, Count{lanes});
    if (i < n) body(load_tail(in(x) + i, n - i), i, n - i);
  }

  static std::uint32_t largest(const void* x, Count n) {
    U most{};
    for_registers(x, n, [&](F f, Count, Count) {
      const U magnitude = fp8_finite_magnitude<Fp8Registers>(f);
      most = (I)magnitude > (I)most ? magnitude : most;
    });
    std::uint32_t out = 0;
    for (int k = 0; k < lanes; ++k) out = most[k] > out ? most[k] : out;
    return out;
  }

  template <Fp8Format format>
  static void to_fp8(const void* x, float inverse, std::uint8_t* codes, Count n, Fp8Lost& lost) {
    U not_finite{}, to_zero{};
    for_registers(x, n, [&](F f, Count i, Count count) {
      const U code = fp8_encode<format, Fp8Registers>(f, all(inverse));
      const U magnitude = (U)f & 0x7fffffffu;
      not_finite -= (U)((I)magnitude >= 0x7f800000);  // a register's true is -1
      to_zero -= (U)((magnitude != 0u) & ((code & 0x7fu) == 0u));
      const Codes8 bytes = narrow_to_bytes(code);
      __builtin_memcpy(codes + i, &bytes, static_cast<std::size_t>(count));
    });
    for (int k = 0; k < lanes; ++k) lost.not_finite += not_finite[k], lost.to_zero += to_zero[k];
  }

  template <Fp8Format format>
  static void from_fp8(const std::uint8_t* codes, float scale, void* y, Count n) {
    const auto values = [&](const std::uint8_t* from) {
      return fp8_decode<format, Fp8Registers>(widen(load_as<Codes8>(from))) * all(scale);
    };
    Count i = 0;
    for (; i + lanes <= n; i += lanes) store(out(y) + i, values(codes + i));
    if (i == n) return;
    std::uint8_t rest[lanes] = {};
    __builtin_memcpy(rest, codes + i, static_cast<std::size_t>(n - i));
    store_tail(out(y) + i, values(rest), n - i);
  }
};

template <class S>
constexpr ConvertOps table() {
  using L = ConvertLoops<S>;
  return {L::load_,
          L::store_,
          L::add_to,
          L::accumulate,
          L::blend,
          L::block_squares,
          L::squared_difference,
          L::from_int8,
          L::from_mxfp4,
          L::from_four_bits,
          L::largest,
          {L::template to_fp8<Fp8Format::e4m3>, L::template to_fp8<Fp8Format::e5m2>},
          {L::template from_fp8<Fp8Format::e4m3>, L::template from_fp8<Fp8Format::e5m2>}};
}

}  // namespace

const ConvertOps convert[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA

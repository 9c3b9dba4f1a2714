#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"
#include "tensor/formats/fp8_code.h"
#include "tensor/formats/stored_code.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

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
SHERD_INLINE H narrow_to(F f) {
  if constexpr (same_type<S, Bf16>)
    return to_bf16(f);
  else
    return to_f16(f);
}

/// A table of 16 numbers that lanes look into.
struct SixteenValues {
#if defined(SHERD_ISA_avx512)
  explicit SixteenValues(const float* from) : all_(load_as<F>(from)) {}
  SHERD_INLINE F from(int) const {
    return all_;
  }
  SHERD_INLINE F at(U places) const {
    return (F)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)places, (__m512)all_);
  }

 private:
  F all_;
#elif defined(SHERD_ISA_avx2)
  explicit SixteenValues(const float* from) : low_(load_as<F>(from)), high_(load_as<F>(from + 8)) {}
  SHERD_INLINE F from(int first) const {
    return first == 0 ? low_ : high_;
  }
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

SHERD_INLINE void store_past_caches(void* to, U value) {
#if defined(SHERD_ISA_avx512)
  _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)value);
#elif defined(SHERD_ISA_avx2)
  _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)value);
#else
  _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)value);
#endif
}
/// Has what went past the caches be seen by others.
template <bool stream>
SHERD_INLINE void after() {
  if constexpr (stream) _mm_sfence();
}

/// Blocks lie at odd places and are read slowly beside what memory gives: the hardware does not look as far
/// ahead as it takes.
SHERD_INLINE void read_ahead(const void* from) {
  constexpr int bytes = 1024;
  __builtin_prefetch(static_cast<const char*>(from) + bytes, 0, 2);
}

/// even[first], odd[first], even[first + 1], …: as many as a register has.
template <int first>
SHERD_INLINE F interleaved(F even, F odd) {
  U places;
  for (int k = 0; k < lanes; ++k) places[k] = static_cast<std::uint32_t>(first + k / 2 + (k % 2) * lanes);
  return __builtin_shuffle(even, odd, places);
}

/// A table of 16 numbers of 16 bits, which codes in half bytes look into: 32 codes in 16 bytes at once.
#if defined(SHERD_ISA_avx512)
struct SixteenHalves {
  template <class S>
  SHERD_INLINE SixteenHalves(const SixteenValues& values, F scale, const S*) {
    const F results = values.from(0) * scale;
    const __m512i one = _mm512_castsi256_si512((__m256i)narrow_to<S>(results));
    twice_ = _mm512_inserti64x4(one, _mm512_castsi512_si256(one), 1);
  }
  template <bool stream, bool upper_first>
  SHERD_INLINE void look_up(const std::uint8_t* codes, void* to) const {
    const U bytes = widen(load_as<Codes8>(codes));
    // A 16-bit lane looks by its five lowest bits, of which the fifth makes no difference.
    const U places = upper_first ? (bytes >> 4) | (bytes << 16) : bytes | (bytes << 12);
    const U found = (U)_mm512_maskz_permutexvar_epi16(0xffffffff, (__m512i)places, twice_);
    stream ? store_past_caches(to, found) : store_as(static_cast<char*>(to), found);
  }

 private:
  __m512i twice_;
};
#elif defined(SHERD_ISA_avx2)
struct SixteenHalves {
  template <class S>
  SHERD_INLINE SixteenHalves(const SixteenValues& values, F scale, const S*) {
    const auto a = (__m128i)narrow_to<S>(values.from(0) * scale),
               b = (__m128i)narrow_to<S>(values.from(8) * scale), byte = _mm_set1_epi16(0xff);
    lower_ = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)));
    upper_ = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
  }
  template <bool stream, bool upper_first>
  SHERD_INLINE void look_up(const std::uint8_t* codes, void* to) const {
    const __m256i half = _mm256_set1_epi8(15);
    // Eight bytes in each half of the register, whose 16 codes then stay there.
    const __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))), 0x10);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), half),
                  low = _mm256_and_si256(bytes, half);
    const __m256i places = upper_first ? _mm256_unpacklo_epi8(high, low) : _mm256_unpacklo_epi8(low, high);
    const __m256i lower = _mm256_shuffle_epi8(lower_, places), upper = _mm256_shuffle_epi8(upper_, places);
    const __m256i a = _mm256_unpacklo_epi8(lower, upper), b = _mm256_unpackhi_epi8(lower, upper);
    auto* out = static_cast<char*>(to);
    put<stream>(out, _mm256_permute2x128_si256(a, b, 0x20));
    put<stream>(out + 32, _mm256_permute2x128_si256(a, b, 0x31));
  }

  /// 32 codes of E4M3 as bf16, where the table is of e4m3_least.
  template <bool stream>
  SHERD_INLINE void from_e4m3(const std::uint8_t* from, void* to) const {
    const auto byte = [](int value) { return _mm256_set1_epi8(static_cast<char>(value)); };
    const __m256i codes = _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
                                                   0xd8);  // as unpacking takes halves
    const __m256i exponent = _mm256_and_si256(codes, byte(0x78)), sign = _mm256_and_si256(codes, byte(0x80));
    const __m256i subnormal = _mm256_cmpeq_epi8(exponent, byte(0));
    const __m256i nan = _mm256_cmpeq_epi8(_mm256_or_si256(codes, byte(0x80)), byte(0xff));
    const __m256i places =
        _mm256_or_si256(_mm256_and_si256(codes, byte(7)), _mm256_and_si256(subnormal, byte(8)));
    const __m256i lower = _mm256_blendv_epi8(_mm256_shuffle_epi8(lower_, places), byte(0xc0), nan);
    const __m256i upper =
        _mm256_or_si256(sign, _mm256_blendv_epi8(_mm256_shuffle_epi8(upper_, places), byte(0x7f), nan));
    const __m256i raised = _mm256_andnot_si256(nan, _mm256_subs_epu8(exponent, byte(8)));
    auto* out = static_cast<char*>(to);
    put<stream>(out, _mm256_add_epi16(_mm256_unpacklo_epi8(lower, upper),
                                      _mm256_slli_epi16(_mm256_unpacklo_epi8(raised, byte(0)), 4)));
    put<stream>(out + 32, _mm256_add_epi16(_mm256_unpackhi_epi8(lower, upper),
                                           _mm256_slli_epi16(_mm256_unpackhi_epi8(raised, byte(0)), 4)));
  }

 private:
  template <bool stream>
  SHERD_INLINE static void put(char* to, __m256i value) {
    stream ? store_past_caches(to, (U)value) : store_as(to, value);
  }
  __m256i lower_, upper_;  ///< bytes of the numbers
};

/// The values of E4M3's mantissas with the exponent of the least normal number, and as subnormal numbers.
/// Greater normal ones have the same digits, also when they are rounded to bf16: the exponents add.
constexpr float e4m3_least[16] = {0x8p-9f, 0x9p-9f, 0xap-9f, 0xbp-9f, 0xcp-9f, 0xdp-9f, 0xep-9f, 0xfp-9f,
                                  0x0p-9f, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f};
/// Whether all E4M3's numbers times the scale are normal ones of bf16, or zero.
SHERD_INLINE bool e4m3_stays_normal(float scale) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &scale, sizeof bits);
  return bits - (10u << 23) < (246u - 10u) << 23;  // 2⁻¹¹⁷ to 2¹¹⁹
}
#endif

/// Registers for tensor/formats/fp8_code.h.
struct Fp8Registers {
  using F = SHERD_ISA::F;
  using U = SHERD_ISA::U;
  using I = SHERD_ISA::I;
  SHERD_INLINE static U bits(F f) { return (U)f; }
  SHERD_INLINE static F value(U u) { return (F)u; }
};

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

  /// Values of 2·lanes consecutive elements, the even ones and the odd ones. `stream`: past the caches, to
  /// where a register may be stored. `numbers`: as round_number_to_bf16() takes them.
  template <bool stream, bool numbers = false>
  SHERD_INLINE static void store_values(S* to, F even, F odd) {
    if constexpr (same_type<S, Bf16>) {
      const auto round = [](F f) { return numbers ? round_number_to_bf16(f) : round_to_bf16(f); };
      const U both = (round(even) >> 16) | (round(odd) & 0xffff0000u);
      stream ? store_past_caches(to, both) : store_as(to, both);
    } else {
      const F low = interleaved<0>(even, odd), high = interleaved<lanes / 2>(even, odd);
      if constexpr (same_type<S, float> && stream) {
        store_past_caches(to, (U)low), store_past_caches(to + lanes, (U)high);
      } else {
        store(to, low), store(to + lanes, high);
      }
    }
  }

  /// Values of codes of a byte: body(both) takes lanes of two codes each, and gives {even ones, odd ones}.
  template <bool stream, bool numbers = false, class Body>
  SHERD_INLINE static void from_bytes(const std::uint8_t* codes, Count n, S* to, Body body) {
    for (Count k = 0; k < n; k += 2 * lanes) {
      const U both = widen(load_as<H>(codes + k));
      const Pair values = body(both);
      store_values<stream, numbers>(to + k, values.a, values.b);
    }
  }
  /// Values of codes of half a byte; n: a multiple of 32.
  template <bool stream, bool upper_first>
  SHERD_INLINE static void from_halves(const SixteenValues& values, const std::uint8_t* codes, Count n,
                                       F scale, S* to) {
#if defined(SHERD_ISA_avx512) || defined(SHERD_ISA_avx2)
    if constexpr (!same_type<S, float>) {  // there are 16 results: each is rounded once, and then looked up
      const SixteenHalves all_of(values, scale, to);
      for (Count k = 0; k < n; k += 32) all_of.template look_up<stream, upper_first>(codes + k / 2, to + k);
      return;
    }
#endif
    for (Count k = 0; k < n; k += 2 * lanes) {
      const U both = widen(load_as<Codes8>(codes + k / 2));
      const F upper = values.at(both >> 4) * scale, lower = values.at(both & 15u) * scale;
      store_values<stream>(to + k, upper_first ? upper : lower, upper_first ? lower : upper);
    }
  }

  template <bool stream>
  static void from_int8(const void* blocks, void* y, Count count) {
    const auto* from = static_cast<const std::uint8_t*>(blocks);
    for (S* to = out(y); count > 0; --count, from += int8_block_bytes, to += int8_block) {
      read_ahead(from);
      float scale;
      __builtin_memcpy(&scale, from + int8_block, sizeof scale);
      const auto values = [&](U both) {
        const auto value = [&](U at_top) { return __builtin_convertvector((I)at_top >> 24, F) * all(scale); };
        return Pair{value(both << 24), value(both << 16)};
      };
      if (scale == scale)
        from_bytes<stream, true>(from, int8_block, to, values);
      else
        from_bytes<stream>(from, int8_block, to, values);
    }
    after<stream>();
  }

  template <bool stream>
  static void from_stored_fp8(const void* blocks, void* y, Count count) {
    const auto* from = static_cast<const std::uint8_t*>(blocks);
    for (S* to = out(y); count > 0; --count, from += stored_fp8_block_bytes, to += stored_fp8_block) {
      read_ahead(from), read_ahead(from + stored_fp8_block / 2);
      float scale;
      __builtin_memcpy(&scale, from + stored_fp8_block, sizeof scale);
#if defined(SHERD_ISA_avx2)
      if constexpr (same_type<S, Bf16>) {
        if (e4m3_stays_normal(scale)) {
          const SixteenHalves all_of(SixteenValues(e4m3_least), all(scale), to);
          for (Count k = 0; k < stored_fp8_block; k += 32) all_of.from_e4m3<stream>(from + k, to + k);
          continue;
        }
      }
#endif
      from_bytes<stream>(from, stored_fp8_block, to, [&](U both) {
        const auto value = [&](U code) {
          return fp8_decode<Fp8Format::e4m3, Fp8Registers>(code) * all(scale);
        };
        return Pair{value(both & 0xffu), value(both >> 8)};
      });
    }
    after<stream>();
  }

  template <bool stream>
  static void from_four_bits(const float* table, const std::uint8_t* codes, Count stride, const void* scales,
                             Count scale_stride, void* y, Count count) {
    const SixteenValues values(table);
    const auto* scale = static_cast<const char*>(scales);
    for (S* to = out(y); count > 0; --count, codes += stride, scale += scale_stride, to += four_bit_block) {
      read_ahead(codes);
      float factor;
      __builtin_memcpy(&factor, scale, sizeof factor);
      from_halves<stream, true>(values, codes, four_bit_block, all(factor), to);
    }
    after<stream>();
  }

  template <bool stream>
  static void from_mxfp4(const void* blocks, void* y, Count count) {
    const SixteenValues values(mxfp4_values);
    const auto* from = static_cast<const std::uint8_t*>(blocks);
    for (S* to = out(y); count > 0; --count, from += mxfp4_block_bytes, to += mxfp4_block) {
      read_ahead(from);
      const F scale = (F)all(static_cast<std::uint32_t>(from[mxfp4_codes]) << 23);
      from_halves<stream, false>(values, from, mxfp4_block, scale, to);
    }
    after<stream>();
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
          {L::template from_int8<false>, L::template from_int8<true>},
          {L::template from_stored_fp8<false>, L::template from_stored_fp8<true>},
          {L::template from_mxfp4<false>, L::template from_mxfp4<true>},
          {L::template from_four_bits<false>, L::template from_four_bits<true>},
          L::largest,
          {L::template to_fp8<Fp8Format::e4m3>, L::template to_fp8<Fp8Format::e5m2>},
          {L::template from_fp8<Fp8Format::e4m3>, L::template from_fp8<Fp8Format::e5m2>}};
}

}  // namespace

const ConvertOps convert[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA

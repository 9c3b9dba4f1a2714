#include "optim/isa/loop.h"
#include "optim/isa/tables.h"

namespace sherd::optim::SHERD_ISA {
namespace {

constexpr int block = 256;

struct Codes {
  alignas(64) std::uint8_t codes[block] = {};
};

#if defined(SHERD_ISA_avx512)

constexpr __mmask16 every = 0xffff;  // GCC 12 warns of the plain forms

/// A map in registers.
template <bool has_signs>
struct CodeDecoder {
  __m512 base, slope;
  SHERD_INLINE explicit CodeDecoder(const DynamicMap& map)
      : base(_mm512_load_ps(map.base)), slope(_mm512_load_ps(map.slope)) {}

  /// The values of 16 codes, not yet multiplied by the scale.
  SHERD_INLINE F operator()(const std::uint8_t* codes) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m512i code = _mm512_maskz_cvtepu8_epi32(every, bytes);
    if constexpr (has_signs) {
      const I from_middle = (I)code - 127;
      const __m512i k = _mm512_maskz_abs_epi32(every, (__m512i)from_middle);
      return (F)((U)magnitude(k) ^ ((U)from_middle & 0x80000000u));
    } else {
      return magnitude((__m512i)((I)code + 1));
    }
  }

 private:
  SHERD_INLINE F magnitude(__m512i k) const {
    const __m512i row = _mm512_maskz_lzcnt_epi32(every, k);
    const F number = (F)_mm512_maskz_cvtepi32_ps(every, k);
    return (F)_mm512_maskz_permutexvar_ps(every, row, slope) * number +
           (F)_mm512_maskz_permutexvar_ps(every, row, base);
  }
};

template <bool has_signs>
struct CodeEncoder {
  __m512 next_a, next_b, inverse, offset, top;
  SHERD_INLINE explicit CodeEncoder(const DynamicMap& map)
      : next_a(_mm512_load_ps(map.next_level)),
        next_b(_mm512_load_ps(map.next_level + 16)),
        inverse(_mm512_load_ps(map.inverse)),
        offset(_mm512_load_ps(map.offset)),
        top(_mm512_load_ps(map.top)) {}

  /// The codes of 16 values between -1 and 1.
  SHERD_INLINE void operator()(F value, std::uint8_t* codes) const {
    // The larger magnitude of two, without a sign: no exponent is below that of the table's first row.
    const __m512 size = _mm512_maskz_range_ps(every, (__m512)value, _mm512_set1_ps(0x1p-31f), 0x0b);
    const __m512i exponent = (__m512i)((U)size >> 23);
    // Its low bits, which alone count below, are the level before it.
    const __m512 next = _mm512_maskz_permutex2var_ps(every, next_a, exponent, next_b);
    const __mmask16 reached = _mm512_cmp_ps_mask(size, next, _CMP_GE_OQ);
    const __m512i level = _mm512_mask_add_epi32((__m512i)next, reached, (__m512i)next, _mm512_set1_epi32(1));
    const F number = (F)size * (F)_mm512_maskz_permutexvar_ps(every, level, inverse) +
                     (F)_mm512_maskz_permutexvar_ps(every, level, offset);
    const __m512 k =
        _mm512_maskz_min_ps(every, (__m512)number, _mm512_maskz_permutexvar_ps(every, level, top));
    __m128i bytes;
    if constexpr (has_signs) {
      // Minus k where the value is above zero: -128 to 127, where -1 stays by saturation. Then 127 minus
      // that.
      const __m512i turned = _mm512_maskz_ternarylogic_epi32(
          every, (__m512i)k, (__m512i)value, _mm512_set1_epi32(static_cast<int>(0x80000000u)), 0xf2);
      bytes = _mm512_maskz_cvtsepi32_epi8(every, _mm512_maskz_cvtps_epi32(every, (__m512)turned));
      bytes = _mm_xor_si128(bytes, _mm_set1_epi8(0x7f));
    } else {
      // Nothing but zero takes the code of zero.
      const __mmask16 above_zero = _mm512_cmp_ps_mask((__m512)value, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      const __m512 least = _mm512_mask_max_ps(k, above_zero, k, _mm512_set1_ps(1));
      bytes = _mm512_maskz_cvtepi32_epi8(every, _mm512_maskz_cvtps_epi32(every, least));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), bytes);
  }
};

#else

template <bool has_signs>
struct CodeDecoder {
  const float* values;
  SHERD_INLINE explicit CodeDecoder(const DynamicMap& map) : values(map.values) {}
  SHERD_INLINE F operator()(const std::uint8_t* codes) const {
    F out;
    for (int i = 0; i < lanes; ++i) out[i] = values[codes[i]];
    return out;
  }
};

template <bool has_signs>
struct CodeEncoder {
  const DynamicMap& map;
  SHERD_INLINE explicit CodeEncoder(const DynamicMap& given) : map(given) {}
  SHERD_INLINE void operator()(F value, std::uint8_t* codes) const {
    const F size = (F)magnitude(value);
    F inverse = all(map.inverse[0]), offset = all(map.offset[0]), top = all(map.top[0]);
    for (int level = 1; level < DynamicMap::levels; ++level) {
      const I reached = size >= all(map.begin[level]);
      inverse = reached ? all(map.inverse[level]) : inverse;
      offset = reached ? all(map.offset[level]) : offset;
      top = reached ? all(map.top[level]) : top;
    }
    const F number = size * inverse + offset, bounded = number < top ? number : top;
#if defined(SHERD_ISA_avx2)
    I k = (I)_mm256_cvtps_epi32((__m256)bounded);
#else
    I k = (I)_mm_cvtps_epi32((__m128)bounded);
#endif
    if constexpr (has_signs) {
      const I below_zero = (I)value < 0, most = k < 127 ? k : I{} + 127;
      k = (below_zero ? -most : k) + 127;
    } else {
      const I least = -(I)(value != F{});  // nothing but zero takes the code of zero
      k = k < least ? least : k;
    }
    for (int i = 0; i < lanes; ++i) codes[i] = static_cast<std::uint8_t>(k[i]);
  }
};

#endif

/// Values of one block.
struct Values256 {
  alignas(64) float at[block];
};

template <bool has_signs>
SHERD_INLINE void decode(const CodeDecoder<has_signs>& decoder, const std::uint8_t* codes, float scale,
                         Values256& to) {
#pragma GCC unroll 4
  for (int i = 0; i < block; i += lanes) store(to.at + i, decoder(codes + i) * all(scale));
}

/// The largest magnitude seen, as a scale, and by what elements are multiplied to be encoded.
struct BlockScale {
  float scale = 0, inverse = 0;
  SHERD_INLINE explicit BlockScale(U tops) {
    const float top = __builtin_bit_cast(float, largest(tops));
    if (top < least_scale) return;
    scale = top, inverse = 1.0f / top;
  }
  BlockScale() = default;
};

SHERD_INLINE BlockScale scale_of(const Values256& values) {
  U tops{};
  for (int i = 0; i < block; i += lanes) tops = larger(tops, magnitude(load(values.at + i)));
  return BlockScale(tops);
}

template <class Encode>
SHERD_INLINE void encode_turn(const Encode& encode, const Values256& from, int i, float inverse,
                              std::uint8_t* codes) {
  encode(load(from.at + i) * all(inverse), codes + i);
  encode(load(from.at + i + lanes) * all(inverse), codes + i + lanes);
}

template <bool has_signs>
void quantize(const DynamicMap& map, const float* values, std::uint8_t* codes, float* scales,
              std::int64_t n) {
  const CodeEncoder<has_signs> encode(map);
  for (std::int64_t i = 0; i < n; i += block) {
    const std::int64_t count = n - i < block ? n - i : block;
    Values256 mine{};
    Codes made;
    __builtin_memcpy(mine.at, values + i, static_cast<std::size_t>(count) * sizeof(float));
    const BlockScale scale = scale_of(mine);
    for (int k = 0; k < block; k += turn) encode_turn(encode, mine, k, scale.inverse, made.codes);
    scales[i / block] = scale.scale;
    __builtin_memcpy(codes + i, made.codes, static_cast<std::size_t>(count));
  }
}

/// Adam over blocks, each of which is encoded while the next one is updated: the one waits for divisions and
/// roots, which the other has none of.
template <class S>
class Blocks {
 public:
  SHERD_INLINE Blocks(const DynamicMap& signs, const DynamicMap& sizes, const Adam& rule, float factor)
      : decode_first_(signs),
        decode_second_(sizes),
        encode_first_(signs),
        encode_second_(sizes),
        rule_(rule),
        factor_(factor) {
    for (Updated& one : updated_) one.first_codes = spare_.codes, one.second_codes = spare_.codes;
  }

  /// A whole block from element `i` of the streams on.
  SHERD_INLINE void update(const SpanChunk& c, std::int64_t i, float& first_scale, float& second_scale) {
    Updated &now = updated_[now_], &before = updated_[1 - now_];
    now.first_codes = static_cast<std::uint8_t*>(c.first) + i;
    now.second_codes = static_cast<std::uint8_t*>(c.second) + i;
    SpanChunk streams = part(c, i);
    streams.first = now.first.at, streams.second = now.second.at;
    const Adam rule = rule_;
    const float factor = factor_;
    const auto step = [&](F& p, F g, F& first, F& second)
                          SHERD_ALWAYS { step_element(rule, Math{}, p, g * factor, first, second); };
    const F scale = all(first_scale), size_scale = all(second_scale);
    const auto decode = [&](int k) SHERD_ALWAYS {
#pragma GCC unroll 2
      for (int at = k; at < k + turn; at += lanes) {
        store(now.first.at + at, decode_first_(now.first_codes + at) * scale);
        store(now.second.at + at, decode_second_(now.second_codes + at) * size_scale);
      }
    };
    U firsts{};
    Tops tops;
    decode(0);
    for (int k = 0; k < block; k += turn) {
      fetch_streams(streams, k + ahead);
      optim::SHERD_ISA::step<S>(streams, k, {}, tops, step);
      if (k + turn < block) decode(k + turn);  // ahead of time: divisions wait for it
      encode(before, k);
#pragma GCC unroll 2
      for (int at = k; at < k + turn; at += lanes)
        firsts = larger(firsts, magnitude(load(now.first.at + at)));
    }
    tops_.weight = larger(tops_.weight, tops.weight), tops_.moment = larger(tops_.moment, tops.moment);
    now.first_scale = BlockScale(firsts), now.second_scale = BlockScale(tops.moment);
    first_scale = now.first_scale.scale, second_scale = now.second_scale.scale;
    now_ = 1 - now_;
  }

  /// Encodes the block that was updated last; then others may come, or nothing.
  SHERD_INLINE void finish() {
    Updated& last = updated_[1 - now_];
    for (int k = 0; k < block; k += turn) encode(last, k);
    last.first_codes = last.second_codes = spare_.codes;
  }

  SHERD_INLINE Extremes extremes() const {
    return {largest(tops_.weight), largest(tops_.moment)};
  }

 private:
  struct Updated {
    Values256 first{}, second{};
    BlockScale first_scale, second_scale;
    std::uint8_t *first_codes, *second_codes;
  };

  SHERD_INLINE static SpanChunk part(const SpanChunk& c, std::int64_t i) {
    SpanChunk out = c;
    if constexpr (S::has_master) out.master = c.master + i;
    if constexpr (!S::has_master) out.low = c.low + i;
    if constexpr (S::has_param) out.param = static_cast<std::uint16_t*>(c.param) + i;
    out.grad = gradient_at(c, i);
    return out;
  }
  SHERD_INLINE static void fetch_streams(const SpanChunk& c, std::int64_t i) {
    fetch<float>(gradient_at(c, i), 0);
    if constexpr (S::has_master) fetch<float>(c.master, i);
    if constexpr (!S::has_master) fetch<Bf16>(c.param, i), fetch<Bf16>(c.low, i);
  }
  SHERD_INLINE void encode(const Updated& from, int k) const {
    encode_turn(encode_first_, from.first, k, from.first_scale.inverse, from.first_codes);
    encode_turn(encode_second_, from.second, k, from.second_scale.inverse, from.second_codes);
  }

  CodeDecoder<true> decode_first_;
  CodeDecoder<false> decode_second_;
  CodeEncoder<true> encode_first_;
  CodeEncoder<false> encode_second_;
  Adam rule_;
  float factor_;
  Updated updated_[2];
  int now_ = 0;  ///< the one to be updated next
  Codes spare_;  ///< take the codes of a block that never was
  Tops tops_;
};

/// The last block of a parameter, of fewer elements: a copy, filled up with its first one, which shows in no
/// scale.
template <class S>
struct ShortBlock {
  alignas(64) float master[block] = {};
  alignas(64) std::uint16_t low[block] = {}, param[block] = {};
  alignas(64) char grad[block * sizeof(float)] = {};
  Codes first{}, second{};

  /// Copies `n` elements from the streams, or back.
  template <bool back>
  SHERD_INLINE void move(const SpanChunk& c, std::int64_t i, std::int64_t n) {
    const auto copy = [n](auto* mine, auto* theirs) SHERD_ALWAYS {
      if constexpr (back) {
        __builtin_memcpy(theirs, mine, static_cast<std::size_t>(n) * sizeof *mine);
      } else {
        __builtin_memcpy(mine, theirs, static_cast<std::size_t>(n) * sizeof *mine);
        for (std::int64_t k = n; k < block; ++k) mine[k] = mine[0];
      }
    };
    if constexpr (S::has_master) copy(master, c.master + i);
    if constexpr (!S::has_master) copy(low, c.low + i);
    if constexpr (S::has_param) copy(param, static_cast<std::uint16_t*>(c.param) + i);
    copy(first.codes, static_cast<std::uint8_t*>(c.first) + i);
    copy(second.codes, static_cast<std::uint8_t*>(c.second) + i);
    if constexpr (!back) {
      const auto size = static_cast<std::size_t>(gradient_size(c));
      __builtin_memcpy(grad, gradient_at(c, i), static_cast<std::size_t>(n) * size);
      for (std::size_t k = static_cast<std::size_t>(n); k < block; ++k)
        __builtin_memcpy(grad + k * size, grad, size);
    }
  }
  SHERD_INLINE SpanChunk chunk(const SpanChunk& c) {
    SpanChunk mine = c;
    mine.master = master, mine.low = low, mine.param = param, mine.grad = grad;
    mine.first = first.codes, mine.second = second.codes, mine.stream = false;
    return mine;
  }
};

template <class P>
Extremes update(const SpanChunk& c, const void* rule, const DynamicMap& signs, const DynamicMap& sizes,
                float* first_scales, float* second_scales) {
  using S = Streams<P, float, Adam>;
  Blocks<S> blocks(signs, sizes, *static_cast<const Adam*>(rule), c.factor);
  std::int64_t i = 0;
  for (; i + block <= c.n; i += block) blocks.update(c, i, first_scales[i / block], second_scales[i / block]);
  blocks.finish();
  if (i < c.n) {
    ShortBlock<S> rest;
    const std::int64_t n = c.n - i;
    rest.template move<false>(c, i, n);
    blocks.update(rest.chunk(c), 0, first_scales[i / block], second_scales[i / block]);
    blocks.finish();
    rest.template move<true>(c, i, n);
  }
  if (c.stream) _mm_sfence();
  return blocks.extremes();
}

}  // namespace

const QuantizedTable quantized_table = {{quantize<false>, quantize<true>},
                                        {update<float>, update<Bf16>, update<F16>, update<Split>}};

}  // namespace sherd::optim::SHERD_ISA

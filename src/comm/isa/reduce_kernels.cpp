#include "comm/isa/reduce_kernels.h"

#if defined(SHERD_ISA_avx2) || defined(SHERD_ISA_avx512)
#include <immintrin.h>
#else
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include "base/dtype.h"
#endif

namespace sherd::comm::SHERD_ISA {
namespace {

#if defined(SHERD_ISA_avx512)
constexpr int lanes = 16;
#elif defined(SHERD_ISA_avx2)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float Vec __attribute__((vector_size(lanes * 4)));
typedef std::uint32_t Bits __attribute__((vector_size(lanes * 4)));
typedef std::uint16_t Half __attribute__((vector_size(lanes * 2)));

/// Storage of one element; the tag keeps bf16 and fp16, which are both 16 bits, apart.
struct F32 {
  using Stored = float;
};
struct BF16 {
  using Stored = std::uint16_t;
};
struct StoredF16 {
  using Stored = std::uint16_t;
};

template <class V, class T>
inline V read(const T* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

inline Vec half_to_vec(Half h) {
#if defined(SHERD_ISA_avx512)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(SHERD_ISA_avx2)
  return (Vec)_mm256_cvtph_ps((__m128i)h);
#else
  Vec v;
  for (int i = 0; i < lanes; ++i) {
    f16 x;
    x.bits = h[i];
    v[i] = static_cast<float>(x);
  }
  return v;
#endif
}

inline Half vec_to_half(Vec v) {
#if defined(SHERD_ISA_avx512)
  return (Half)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(SHERD_ISA_avx2)
  return (Half)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  Half h;
  for (int i = 0; i < lanes; ++i) h[i] = f16(v[i]).bits;
  return h;
#endif
}

/// Nearest, ties to even; a NaN stays one. The result is in the low 16 bits of each lane.
inline Bits to_bf16_bits(Vec v) {
  const Bits u = (Bits)v;
  const Bits rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Bits quiet = (u >> 16) | 0x40u;
  return ((u & 0x7fffffffu) > 0x7f800000u) ? quiet : rounded;
}

inline Vec load(F32, const float* p) {
  return read<Vec>(p);
}
inline Vec load(BF16, const std::uint16_t* p) {
  return (Vec)(__builtin_convertvector(read<Half>(p), Bits) << 16);
}
inline Vec load(StoredF16, const std::uint16_t* p) {
  return half_to_vec(read<Half>(p));
}

inline void store(F32, float* p, Vec v) {
  __builtin_memcpy(p, &v, sizeof v);
}
inline void store(BF16, std::uint16_t* p, Vec v) {
  const Half h = __builtin_convertvector(to_bf16_bits(v), Half);
  __builtin_memcpy(p, &h, sizeof h);
}
inline void store(StoredF16, std::uint16_t* p, Vec v) {
  const Half h = vec_to_half(v);
  __builtin_memcpy(p, &h, sizeof h);
}

/// Bytes that one non-temporal store takes, at addresses that are multiples of it.
#if defined(SHERD_ISA_avx512)
constexpr std::size_t streamed = 64;
inline void stream_bytes(void* to, const void* from) {
  _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(from));
}
#elif defined(SHERD_ISA_avx2)
constexpr std::size_t streamed = 32;
inline void stream_bytes(void* to, const void* from) {
  _mm256_stream_si256((__m256i*)to, _mm256_loadu_si256((const __m256i*)from));
}
#elif defined(__SSE2__)
constexpr std::size_t streamed = 16;
inline void stream_bytes(void* to, const void* from) {
  _mm_stream_si128((__m128i*)to, _mm_loadu_si128((const __m128i*)from));
}
#else
constexpr std::size_t streamed = 16;
inline void stream_bytes(void* to, const void* from) {
  __builtin_memcpy(to, from, streamed);
}
#endif

/// Non-temporal stores are ordered before what follows only by this.
inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// Far enough for memory to answer in time, and across the end of a page, where the hardware's prefetcher
/// stops.
constexpr std::size_t prefetch_ahead = 1024;

template <std::size_t bytes>
inline void prefetch(const void* from) {
  for (std::size_t b = 0; b < bytes; b += 64)
    __builtin_prefetch(static_cast<const char*>(from) + prefetch_ahead + b);
}

inline Vec round_to(Element rounding, Vec v) {
  if (rounding == Element::bf16) return (Vec)(to_bf16_bits(v) << 16);
  if (rounding == Element::f16) return half_to_vec(vec_to_half(v));
  return v;
}

/// `unroll` vectors of one source from element i on, each rounded alone where `rounds`: where that may change
/// them.
template <class In, bool rounds, int unroll>
inline void read_source(const ReduceArgs& args, int rank, std::int64_t i, Vec (&values)[unroll]) {
  using T = typename In::Stored;
  const T* from = static_cast<const T*>(args.sources[rank]) + i;
  prefetch<unroll * lanes * sizeof(T)>(from);
  for (int u = 0; u < unroll; ++u) {
    values[u] = load(In{}, from + u * lanes);
    if constexpr (rounds) values[u] = round_to(args.rounding, values[u]);
  }
}

/// The start of the sum, in fp32 or in the type of the outputs.
template <class Out>
inline Vec load_onto(const ReduceArgs& args, std::int64_t i) {
  if (args.onto_type == Element::f32) return load(F32{}, static_cast<const float*>(args.onto) + i);
  return load(Out{}, static_cast<const typename Out::Stored*>(args.onto) + i);
}

/// The sum of `unroll` vectors from element i on.
template <class In, class Out, bool rounds, int unroll, int fixed_ranks>
inline void sum_at(const ReduceArgs& args, std::int64_t i, Vec factor, Vec (&sum)[unroll]) {
  const int ranks = fixed_ranks ? fixed_ranks : args.ranks;
  read_source<In, rounds>(args, 0, i, sum);
  if (args.onto)
    for (int u = 0; u < unroll; ++u) sum[u] = load_onto<Out>(args, i + u * lanes) + sum[u];
  for (int r = 1; r < ranks; ++r) {
    Vec next[unroll];
    read_source<In, rounds>(args, r, i, next);
    for (int u = 0; u < unroll; ++u) sum[u] = sum[u] + next[u];
  }
  for (int u = 0; u < unroll; ++u) sum[u] = sum[u] * factor;
}

template <class In, class Out, bool rounds, int unroll, int fixed_ranks>
inline void step(const ReduceArgs& args, std::int64_t i, Vec factor) {
  using T = typename Out::Stored;
  Vec sum[unroll];
  sum_at<In, Out, rounds, unroll, fixed_ranks>(args, i, factor, sum);
  for (int k = 0; k < args.outputs; ++k) {
    T* to = static_cast<T*>(args.outs[k]) + i;
    for (int u = 0; u < unroll; ++u) store(Out{}, to + u * lanes, sum[u]);
  }
}

/// A few elements at an end take the same instructions as the rest, through padded copies, so that where a
/// tensor is cut cannot change a result.
template <class In, class Out, bool rounds>
void fringe(const ReduceArgs& args, std::int64_t i, std::int64_t end, Vec factor) {
  const auto left = static_cast<std::size_t>(end - i);
  using I = typename In::Stored;
  using O = typename Out::Stored;
  const auto source = [&](int r) {
    I in[lanes] = {};
    __builtin_memcpy(in, static_cast<const I*>(args.sources[r]) + i, left * sizeof(I));
    const Vec value = load(In{}, in);
    return rounds ? round_to(args.rounding, value) : value;
  };
  Vec sum = source(0);
  if (args.onto) {
    const std::size_t width = args.onto_type == Element::f32 ? sizeof(float) : sizeof(O);
    alignas(float) char onto[lanes * sizeof(float)] = {};
    __builtin_memcpy(onto, static_cast<const char*>(args.onto) + static_cast<std::size_t>(i) * width,
                     left * width);
    ReduceArgs padded = args;
    padded.onto = onto;
    sum = load_onto<Out>(padded, 0) + sum;
  }
  for (int r = 1; r < args.ranks; ++r) sum = sum + source(r);
  O out[lanes] = {};
  store(Out{}, out, sum * factor);
  for (int k = 0; k < args.outputs; ++k)
    __builtin_memcpy(static_cast<O*>(args.outs[k]) + i, out, left * sizeof(O));
}

/// Does what the loop of sum_with() does, past the caches: in whole non-temporal stores, after a fringe up to
/// the first of them.
template <class In, class Out, bool rounds, int fixed_ranks>
std::int64_t sum_streaming(const ReduceArgs& args, Vec factor) {
  using T = typename Out::Stored;
  constexpr int unroll = 4;
  constexpr std::size_t bytes = unroll * lanes * sizeof(T);
  T* out = static_cast<T*>(args.outs[0]);
  std::int64_t i = args.begin;
  while (i < args.end && reinterpret_cast<std::uintptr_t>(out + i) % 64 != 0) ++i;
  for (std::int64_t at = args.begin; at < i; at += lanes)
    fringe<In, Out, rounds>(args, at, at + lanes < i ? at + lanes : i, factor);
  for (; i + unroll * lanes <= args.end; i += unroll * lanes) {
    Vec sum[unroll];
    sum_at<In, Out, rounds, unroll, fixed_ranks>(args, i, factor, sum);
    alignas(64) T values[unroll * lanes];
    for (int u = 0; u < unroll; ++u) store(Out{}, values + u * lanes, sum[u]);
    for (std::size_t b = 0; b < bytes; b += streamed)
      stream_bytes(reinterpret_cast<char*>(out + i) + b, reinterpret_cast<const char*>(values) + b);
  }
  end_stream();
  return i;
}

template <class In, class Out, bool rounds, int fixed_ranks>
void sum_with(const ReduceArgs& args) {
  constexpr int unroll = 4;
  const Vec factor = Vec{} + static_cast<float>(args.factor);
  std::int64_t i = args.stream ? sum_streaming<In, Out, rounds, fixed_ranks>(args, factor) : args.begin;
  for (; i + unroll * lanes <= args.end; i += unroll * lanes)
    step<In, Out, rounds, unroll, fixed_ranks>(args, i, factor);
  for (; i + lanes <= args.end; i += lanes) step<In, Out, rounds, 1, fixed_ranks>(args, i, factor);
  if (i < args.end) fringe<In, Out, rounds>(args, i, args.end, factor);
}

template <class In, class Out>
void sum_floats(const ReduceArgs& args) {
  if (args.rounding != Element::f32 && args.rounding != args.in) return sum_with<In, Out, true, 0>(args);
  if (args.ranks == 2) return sum_with<In, Out, false, 2>(args);
  if (args.ranks == 4) return sum_with<In, Out, false, 4>(args);
  sum_with<In, Out, false, 0>(args);
}

template <class In>
bool sum_from(const ReduceArgs& args) {
  switch (args.out) {
    case Element::f32:
      sum_floats<In, F32>(args);
      return true;
    case Element::bf16:
      sum_floats<In, BF16>(args);
      return true;
    case Element::f16:
      sum_floats<In, StoredF16>(args);
      return true;
    default:
      return false;
  }
}

// ---- everything else, element by element in its own type ----

inline float bf16_to_float(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof value);
  return value;
}
inline float f16_to_float(std::uint16_t bits) {
  return half_to_vec(Half{} + bits)[0];
}

/// Reads element i of a floating type, exactly.
inline double read_double(Element type, const void* from, std::int64_t i) {
  switch (type) {
    case Element::f64:
      return static_cast<const double*>(from)[i];
    case Element::f32:
      return static_cast<const float*>(from)[i];
    case Element::bf16:
      return bf16_to_float(static_cast<const std::uint16_t*>(from)[i]);
    default:
      return f16_to_float(static_cast<const std::uint16_t*>(from)[i]);
  }
}

inline void write_double(Element type, void* to, std::int64_t i, double value) {
  const Vec single = Vec{} + static_cast<float>(value);
  switch (type) {
    case Element::f64:
      static_cast<double*>(to)[i] = value;
      return;
    case Element::f32:
      static_cast<float*>(to)[i] = single[0];
      return;
    case Element::bf16:
      static_cast<std::uint16_t*>(to)[i] = static_cast<std::uint16_t>(to_bf16_bits(single)[0]);
      return;
    default:
      static_cast<std::uint16_t*>(to)[i] = vec_to_half(single)[0];
      return;
  }
}

inline double round_double(Element rounding, double value) {
  if (rounding == Element::f64) return value;
  const Vec single = round_to(rounding, Vec{} + static_cast<float>(value));
  return single[0];
}

/// A NaN wins, and of equals the first, so that the result is one of the inputs and the same on all ranks.
template <class T>
inline T better(Combine combine, T held, T next) {
  const bool take = combine == Combine::max ? next > held : next < held;
  return (take || next != next) ? next : held;
}

/// Floating sources where fp64 takes part, and extremes of floats. Sums run in fp64 only when the sources are
/// fp64.
void reduce_doubles(const ReduceArgs& args) {
  const bool wide = args.in == Element::f64;
  const auto add = [&](double sum, double next) {
    return wide ? sum + next : static_cast<float>(sum) + static_cast<float>(next);
  };
  for (std::int64_t i = args.begin; i < args.end; ++i) {
    double value = round_double(args.rounding, read_double(args.in, args.sources[0], i));
    if (args.onto) value = add(read_double(args.onto_type, args.onto, i), value);
    for (int r = 1; r < args.ranks; ++r) {
      const double next = round_double(args.rounding, read_double(args.in, args.sources[r], i));
      value = args.combine == Combine::sum ? add(value, next) : better(args.combine, value, next);
    }
    value = wide ? value * args.factor : static_cast<float>(value) * static_cast<float>(args.factor);
    for (int k = 0; k < args.outputs; ++k) write_double(args.out, args.outs[k], i, value);
  }
}

/// Integers wrap around; a factor is applied in fp64 and rounded to the nearest, ties to even.
template <class T, class Unsigned>
void reduce_integers(const ReduceArgs& args) {
  const auto add = [](T sum, T next) {
    return static_cast<T>(static_cast<Unsigned>(sum) + static_cast<Unsigned>(next));
  };
  for (std::int64_t i = args.begin; i < args.end; ++i) {
    T value = static_cast<const T*>(args.sources[0])[i];
    if (args.onto) value = add(static_cast<const T*>(args.onto)[i], value);
    for (int r = 1; r < args.ranks; ++r) {
      const T next = static_cast<const T*>(args.sources[r])[i];
      value = args.combine == Combine::sum ? add(value, next) : better(args.combine, value, next);
    }
    if (args.factor != 1) value = static_cast<T>(__builtin_llrint(static_cast<double>(value) * args.factor));
    for (int k = 0; k < args.outputs; ++k) static_cast<T*>(args.outs[k])[i] = value;
  }
}

}  // namespace

void reduce(const ReduceArgs& args) {
  if (args.combine == Combine::sum) {
    if (args.in == Element::f32 && sum_from<F32>(args)) return;
    if (args.in == Element::bf16 && sum_from<BF16>(args)) return;
    if (args.in == Element::f16 && sum_from<StoredF16>(args)) return;
  }
  switch (args.in) {
    case Element::i32:
      return reduce_integers<std::int32_t, std::uint32_t>(args);
    case Element::i64:
      return reduce_integers<std::int64_t, std::uint64_t>(args);
    case Element::u16:
      return reduce_integers<std::uint16_t, std::uint32_t>(args);
    case Element::u8:
      return reduce_integers<std::uint8_t, std::uint32_t>(args);
    default:
      return reduce_doubles(args);
  }
}

void copy_past_caches(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t line = 64;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const std::size_t head = (line - reinterpret_cast<std::uintptr_t>(out) % line) % line;
  if (bytes < head + line) {
    __builtin_memcpy(out, in, bytes);
    return;
  }
  __builtin_memcpy(out, in, head);
  std::size_t i = head;
  for (; i + 4 * line <= bytes; i += 4 * line) {
    prefetch<4 * line>(in + i);
    for (std::size_t b = 0; b < 4 * line; b += streamed) stream_bytes(out + i + b, in + i + b);
  }
  end_stream();
  __builtin_memcpy(out + i, in + i, bytes - i);
}

}  // namespace sherd::comm::SHERD_ISA

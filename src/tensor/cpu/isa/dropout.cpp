#include "tensor/cpu/isa/philox.h"
#include "tensor/cpu/isa/tables.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

// The interleavings of 64-bit lanes within each 128 bits.
#if defined(SHERD_ISA_avx512)
SHERD_INLINE U low_halves(Q a, Q b) {
  return (U)_mm512_maskz_unpacklo_epi64(0xff, (__m512i)a, (__m512i)b);
}
SHERD_INLINE U high_halves(Q a, Q b) {
  return (U)_mm512_maskz_unpackhi_epi64(0xff, (__m512i)a, (__m512i)b);
}
#elif defined(SHERD_ISA_avx2)
SHERD_INLINE U low_halves(Q a, Q b) {
  return (U)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
}
SHERD_INLINE U high_halves(Q a, Q b) {
  return (U)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
}
#else
SHERD_INLINE U low_halves(Q a, Q b) {
  return (U)_mm_unpacklo_epi64((__m128i)a, (__m128i)b);
}
SHERD_INLINE U high_halves(Q a, Q b) {
  return (U)_mm_unpackhi_epi64((__m128i)a, (__m128i)b);
}
#endif

SHERD_INLINE Q all64(std::uint64_t value) {
  return value - Q{};
}
/// [low half of a | low half of b] in each 64-bit lane.
SHERD_INLINE Q join(Q a, Q b) {
  return (a & 0xffffffffull) | (b << 32);
}

/// Two independent chains of rounds side by side, to fill the time that each multiplication takes.
constexpr int chains = 2;

/// base/random.h's philox() for the chains·lanes/2 blocks from `index` on: words[k] holds stream elements
/// 4·index + k·lanes and following, one per lane.
SHERD_INLINE void philox(const RoundKeys& keys, std::uint64_t stream, std::uint64_t index,
                         U (&words)[2 * chains]) {
  // One block per 64-bit lane; only the lower half of each lane means anything, as the multiplications read
  // no more. Lane 2q + k computes the block that the interleaving at the end moves to 128-bit part q of
  // words[k].
  Q block;
#pragma GCC unroll 8
  for (int lane = 0; lane < lanes / 2; ++lane)
    block[lane] = static_cast<std::uint64_t>(lane % 2 * (lanes / 4) + lane / 2);
  Q c0[chains], c1[chains], c2[chains], c3[chains];
#pragma GCC unroll 2
  for (int chain = 0; chain < chains; ++chain) {
    c0[chain] = block + (index + static_cast<std::uint64_t>(chain * lanes / 2));
    c1[chain] = c0[chain] >> 32;
    c2[chain] = all64(stream), c3[chain] = all64(stream >> 32);
  }
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int chain = 0; chain < chains; ++chain) {
      const Q p0 = multiply_even((U)c0[chain], all(0xD2511F53u)),
              p1 = multiply_even((U)c2[chain], all(0xCD9E8D57u));
      c0[chain] = (p1 >> 32) ^ c1[chain] ^ all64(keys.even[round]);
      c1[chain] = p1;
      c2[chain] = (p0 >> 32) ^ c3[chain] ^ all64(keys.odd[round]);
      c3[chain] = p0;
    }
  }
#pragma GCC unroll 2
  for (int chain = 0; chain < chains; ++chain) {
    const Q first = join(c0[chain], c1[chain]), second = join(c2[chain], c3[chain]);
    words[2 * chain] = low_halves(first, second);
    words[2 * chain + 1] = high_halves(first, second);
  }
}

template <class S>
struct DropoutLoops {
  template <bool with_residual>
  static void run(const S* x, const S* residual, S* out, Count n, std::uint64_t first, std::uint64_t seed,
                  std::uint64_t stream, std::uint32_t threshold, float factor) {
    const auto step = [=](U word, F u, F r) {
      const F kept = (I)(word >> 8) >= (I)all(threshold) ? u * factor : F{};
      return with_residual ? r + kept : kept;
    };
    const RoundKeys keys(seed);
    constexpr Count step_size = 2 * chains * lanes;
    U words[2 * chains];
    Count i = 0;
    for (; i + step_size <= n; i += step_size) {
      philox(keys, stream, (first + static_cast<std::uint64_t>(i)) / 4, words);
#pragma GCC unroll 2
      for (int chain = 0; chain < chains; ++chain) {
        const Count at = i + chain * 2 * lanes;
        const Pair u = load_pair<false>(x + at), r = with_residual ? load_pair<false>(residual + at) : Pair{};
        store_pair<false>(out + at,
                          Pair{step(words[2 * chain], u.a, r.a), step(words[2 * chain + 1], u.b, r.b)});
      }
    }
    if (i == n) return;
    philox(keys, stream, (first + static_cast<std::uint64_t>(i)) / 4, words);
    for (int k = 0; k < 2 * chains && i < n; ++k, i += lanes) {
      const Count count = n - i < lanes ? n - i : lanes;
      const F r = with_residual ? load_tail(residual + i, count) : F{};
      store_tail(out + i, step(words[k], load_tail(x + i, count), r), count);
    }
  }

  static void dropout(const void* x, const void* residual, void* out, Count n, std::uint64_t first,
                      std::uint64_t seed, std::uint64_t stream, std::uint32_t threshold, float factor) {
    const S* from = static_cast<const S*>(x);
    S* to = static_cast<S*>(out);
    if (residual)
      run<true>(from, static_cast<const S*>(residual), to, n, first, seed, stream, threshold, factor);
    else
      run<false>(from, nullptr, to, n, first, seed, stream, threshold, factor);
  }
};

}  // namespace

const DropoutOps dropout[storage_count] = {
    {DropoutLoops<float>::dropout}, {DropoutLoops<Bf16>::dropout}, {DropoutLoops<F16>::dropout}};

}  // namespace sherd::tensor::cpu::SHERD_ISA

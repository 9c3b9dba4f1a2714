#include "optim/isa/loop.h"

namespace sherd::optim::SHERD_ISA {
namespace {

SHERD_INLINE F square_root(F x) {
#if defined(SHERD_ISA_avx512)
  return (F)_mm512_maskz_sqrt_ps(static_cast<__mmask16>(-1), (__m512)x);  // GCC 12 warns of the plain one
#elif defined(SHERD_ISA_avx2)
  return (F)_mm256_sqrt_ps((__m256)x);
#else
  return (F)_mm_sqrt_ps((__m128)x);
#endif
}

template <class G, class P, class M>
Extremes adam(const Chunk& c, const AdamScalars& scalars) {
  const AdamScalars s = scalars;  // a copy, which no store can alias
  const bool l2 = s.l2;
  return run<Streams<G, P, M, 2>>(c, [&](F& p, F g, F& m, F& v) SHERD_ALWAYS {
    g = g * s.factor;
    if (l2) g = g + s.decay * p;
    m = s.beta1 * m + s.one_minus_beta1 * g;
    v = s.beta2 * v + s.one_minus_beta2 * (g * g);
    const F denominator = square_root(v) * s.root_scale + s.eps;
    if (!l2) p = p - s.decay * p;
    p = p - s.step_size * (m / denominator);
  });
}

}  // namespace

#define SHERD_MOMENTS(G, P) \
  { adam<G, P, float>, adam<G, P, Bf16> }
#define SHERD_MASTERS(G) \
  { SHERD_MOMENTS(G, float), SHERD_MOMENTS(G, Bf16), SHERD_MOMENTS(G, F16), SHERD_MOMENTS(G, Split) }

const AdamTable adam_table = {{SHERD_MASTERS(float), SHERD_MASTERS(Bf16), SHERD_MASTERS(F16)}};

}  // namespace sherd::optim::SHERD_ISA

#include "optim/isa/loop.h"

namespace sherd::optim::SHERD_ISA {
namespace {

template <class G, class P>
Extremes plain(const Chunk& c, const SgdScalars& s) {
  return run<Streams<G, P, float, 0>>(c, [&](F& p, F g, F&, F&) SHERD_ALWAYS {
    g = g * s.factor;
    g = g + s.decay * p;
    p = p - s.lr * g;
  });
}

template <class G, class P, class M>
Extremes momentum(const Chunk& c, const SgdScalars& s) {
  const bool nesterov = s.nesterov;
  return run<Streams<G, P, M, 1>>(c, [&](F& p, F g, F& b, F&) SHERD_ALWAYS {
    g = g * s.factor;
    g = g + s.decay * p;
    b = s.momentum * b + g;
    g = nesterov ? g + s.momentum * b : b;
    p = p - s.lr * g;
  });
}

}  // namespace

#define SHERD_PLAIN(G) \
  { plain<G, float>, plain<G, Bf16>, plain<G, F16>, plain<G, Split> }
#define SHERD_MOMENTS(G, P) \
  { momentum<G, P, float>, momentum<G, P, Bf16> }
#define SHERD_MASTERS(G) \
  { SHERD_MOMENTS(G, float), SHERD_MOMENTS(G, Bf16), SHERD_MOMENTS(G, F16), SHERD_MOMENTS(G, Split) }

const SgdTable sgd_table = {{SHERD_PLAIN(float), SHERD_PLAIN(Bf16), SHERD_PLAIN(F16)},
                            {SHERD_MASTERS(float), SHERD_MASTERS(Bf16), SHERD_MASTERS(F16)}};

}  // namespace sherd::optim::SHERD_ISA

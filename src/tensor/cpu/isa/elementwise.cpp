#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec_math.h"
#include "tensor/glu.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

constexpr float gelu_a = 0x1.988454p-1f;  // √(2/π)
constexpr float gelu_b = 0.044715f;

template <class S>
const S* in(const void* x) {
  return static_cast<const S*>(x);
}
template <class S>
S* out(void* x) {
  return static_cast<S*>(x);
}

/// The loops over elements of S that give f(x), and f(a, b).
template <class S, class Fn>
constexpr Unary* unary(Fn) {
  return [](const void* x, void* y, Count n) { map(Fn{}, n, out<S>(y), in<S>(x)); };
}
template <class S, class Fn>
constexpr Binary* binary(Fn) {
  return [](const void* a, const void* b, void* y, Count n) { map(Fn{}, n, out<S>(y), in<S>(a), in<S>(b)); };
}

template <class S>
void scale(const void* x, float factor, void* y, Count n) {
  map([factor](F u) { return u * factor; }, n, out<S>(y), in<S>(x));
}

template <class S>
void scaled_difference(const void* x, const void* y, float factor, void* dx, Count n) {
  map([factor](F u, F v) { return (u - v) * factor; }, n, out<S>(dx), in<S>(x), in<S>(y));
}

/// An activation and its slope; what a loop does not use of it is not computed.
struct Gate {
  F value, slope;
};
/// The factor beside the gate: up itself.
struct PlainUp {
  SHERD_INLINE static Gate up(F u) { return {u, all(1.0f)}; }
};
template <class S>
struct Silu : PlainUp {
  SHERD_INLINE static Gate both(F u) {
    const Sigmoid s = sigmoid<S>(u);
    return {u * s.value, s.value + u * s.slope};
  }
};
// ½(1 + tanh u) is the logistic function of 2u, which keeps the small tail's relative accuracy.
template <class S>
struct GeluTanh : PlainUp {
  SHERD_INLINE static Gate both(F u) {
    const F square = u * u;
    const Sigmoid s = sigmoid<S>(2.0f * gelu_a * (u + gelu_b * (square * u)));
    const F inner = 2.0f * gelu_a + (6.0f * gelu_a * gelu_b) * square;
    // For large |u| the slope is 0 while inner may overflow to infinity.
    const F bend = s.slope == 0.0f ? F{} : u * s.slope * inner;
    return {u * s.value, s.value + bend};
  }
};
struct GeluErf : PlainUp {
  SHERD_INLINE static Gate both(F u) {
    const Normal d = normal(u);
    return {u * d.cdf, d.cdf + u * d.density};
  }
};

template <class S>
struct SiluClamped {
  static constexpr float limit = clamped_glu_limit, alpha = clamped_glu_alpha;
  SHERD_INLINE static Gate both(F u) {
    const F g = u > limit ? all(limit) : u;
    const Sigmoid s = sigmoid<S>(alpha * g);
    return {g * s.value, u > limit ? F{} : s.value + alpha * g * s.slope};
  }
  SHERD_INLINE static Gate up(F u) {
    const F low = u < -limit ? all(-limit) : u;
    const F within = low > limit ? all(limit) : low;
    return {within + 1.0f, within == u ? all(1.0f) : F{}};
  }
};

template <class S, class Act>
constexpr Binary* glu() {
  return binary<S>([](F g, F u) { return Act::both(g).value * Act::up(u).value; });
}

template <class S, class Act>
void glu_backward(const void* gate, const void* up, const void* dy, void* dgate, void* dup, Count n) {
  const auto step = [](F g, F u, F d, F& d_gate, F& d_up) {
    const Gate act = Act::both(g), factor = Act::up(u);
    d_up = d * act.value * factor.slope;
    d_gate = d * factor.value * act.slope;
  };
  F d_gate, d_up;
  Count i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const Pair g = load_pair<true>(in<S>(gate) + i), u = load_pair<true>(in<S>(up) + i),
               d = load_pair<true>(in<S>(dy) + i);
    Pair to_gate, to_up;
    step(g.a, u.a, d.a, to_gate.a, to_up.a);
    step(g.b, u.b, d.b, to_gate.b, to_up.b);
    store_pair<true>(out<S>(dgate) + i, to_gate);
    store_pair<true>(out<S>(dup) + i, to_up);
  }
  for (; i + lanes <= n; i += lanes) {
    step(load(in<S>(gate) + i), load(in<S>(up) + i), load(in<S>(dy) + i), d_gate, d_up);
    store(out<S>(dgate) + i, d_gate);
    store(out<S>(dup) + i, d_up);
  }
  if (i == n) return;
  step(load_tail(in<S>(gate) + i, n - i), load_tail(in<S>(up) + i, n - i), load_tail(in<S>(dy) + i, n - i),
       d_gate, d_up);
  store_tail(out<S>(dgate) + i, d_gate, n - i);
  store_tail(out<S>(dup) + i, d_up, n - i);
}

template <class S>
void rotate(const void* x, const float* cosine, const float* sine, float direction, void* y, Count half) {
  const S* a = in<S>(x);
  const S* b = a + half;
  Count i = 0;
  for (; i + lanes <= half; i += lanes) {
    const F u = load(a + i), v = load(b + i), c = load(cosine + i), s = load(sine + i) * direction;
    store(out<S>(y) + i, u * c - v * s);
    store(out<S>(y) + half + i, v * c + u * s);
  }
  const Count left = half - i;
  if (left == 0) return;
  const F u = load_tail(a + i, left), v = load_tail(b + i, left);
  const F c = load_tail(cosine + i, left), s = load_tail(sine + i, left) * direction;
  store_tail(out<S>(y) + i, u * c - v * s, left);
  store_tail(out<S>(y) + half + i, v * c + u * s, left);
}

template <class S>
constexpr ElementwiseOps table() {
  return {.add = binary<S>([](F u, F v) { return u + v; }),
          .subtract = binary<S>([](F u, F v) { return u - v; }),
          .multiply = binary<S>([](F u, F v) { return u * v; }),
          .divide = binary<S>([](F u, F v) { return u / v; }),
          .scale = scale<S>,
          .scaled_difference = scaled_difference<S>,
          .gelu_tanh = unary<S>([](F u) { return GeluTanh<S>::both(u).value; }),
          .gelu_erf = unary<S>([](F u) { return GeluErf::both(u).value; }),
          .sigmoid = unary<S>([](F u) { return sigmoid<S>(u).value; }),
          .exp = unary<S>([](F u) { return exp_anywhere<S>(u); }),
          .log = unary<S>([](F u) { return log(u); }),
          .tanh = unary<S>([](F u) { return tanh(u); }),
          // A NaN passes through: only numbers below zero are cut.
          .relu = unary<S>([](F u) { return u < 0.0f ? F{} : u; }),
          .gelu_tanh_backward = binary<S>([](F u, F g) { return g * GeluTanh<S>::both(u).slope; }),
          .gelu_erf_backward = binary<S>([](F u, F g) { return g * GeluErf::both(u).slope; }),
          .sigmoid_backward = binary<S>([](F u, F g) { return g * sigmoid<S>(u).slope; }),
          .exp_backward = binary<S>([](F u, F g) { return g * exp_anywhere<S>(u); }),
          .log_backward = binary<S>([](F u, F g) { return g / u; }),
          .tanh_backward = binary<S>([](F v, F g) { return g * (1.0f - v * v); }),
          .relu_backward = binary<S>([](F v, F g) { return v > 0.0f ? g : F{}; }),
          .glu = {glu<S, Silu<S>>(), glu<S, GeluTanh<S>>(), glu<S, GeluErf>(), glu<S, SiluClamped<S>>()},
          .glu_backward = {glu_backward<S, Silu<S>>, glu_backward<S, GeluTanh<S>>, glu_backward<S, GeluErf>,
                           glu_backward<S, SiluClamped<S>>},
          .logistic_loss = binary<S>(
              [](F u, F v) { return (u < 0.0f ? F{} : u) - u * v + log_of_1_plus(exp_for<S>(-abs(u))); }),
          .logistic_slope = binary<S>([](F u, F v) { return sigmoid<S>(u).value - v; }),
          .rotate = rotate<S>};
}

}  // namespace

const ElementwiseOps elementwise[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA

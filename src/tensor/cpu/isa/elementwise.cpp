#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec_math.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

constexpr float gelu_a = 0x1.988454p-1f;  // √(2/π)
constexpr float gelu_b = 0.044715f;

template <class S>
struct ElementwiseLoops {
  static const S* in(const void* x) { return static_cast<const S*>(x); }
  static S* out(void* x) { return static_cast<S*>(x); }

  static void add(const void* a, const void* b, void* y, Count n) {
    map(
        n, out(y), [](F u, F v) { return u + v; }, in(a), in(b));
  }
  static void subtract(const void* a, const void* b, void* y, Count n) {
    map(
        n, out(y), [](F u, F v) { return u - v; }, in(a), in(b));
  }
  static void divide(const void* a, const void* b, void* y, Count n) {
    map(
        n, out(y), [](F u, F v) { return u / v; }, in(a), in(b));
  }
  static void multiply(const void* a, const void* b, void* y, Count n) {
    map(
        n, out(y), [](F u, F v) { return u * v; }, in(a), in(b));
  }
  static void scale(const void* x, float factor, void* y, Count n) {
    map(
        n, out(y), [factor](F u) { return u * factor; }, in(x));
  }

  // ½(1 + tanh u) is the logistic function of 2u, which keeps the small tail's relative accuracy.
  static void gelu_tanh(const void* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return u * sigmoid<S>(2.0f * gelu_a * (u + gelu_b * (u * u * u))).value; },
        in(x));
  }
  static void gelu_tanh_backward(const void* x, const void* dy, void* dx, Count n) {
    map(
        n, out(dx),
        [](F u, F g) {
          const F square = u * u;
          const Sigmoid s = sigmoid<S>(2.0f * gelu_a * (u + gelu_b * (square * u)));
          const F inner = 2.0f * gelu_a + (6.0f * gelu_a * gelu_b) * square;
          // For large |u| the slope is 0 while inner may overflow to infinity.
          const F bend = s.slope == 0.0f ? F{} : u * s.slope * inner;
          return g * (s.value + bend);
        },
        in(x), in(dy));
  }
  static void gelu_erf(const void* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return u * normal(u).cdf; }, in(x));
  }
  static void gelu_erf_backward(const void* x, const void* dy, void* dx, Count n) {
    map(
        n, out(dx),
        [](F u, F g) {
          const Normal d = normal(u);
          return g * (d.cdf + u * d.density);
        },
        in(x), in(dy));
  }
  static void sigmoid_(const void* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return sigmoid<S>(u).value; }, in(x));
  }
  static void sigmoid_backward(const void* x, const void* dy, void* dx, Count n) {
    map(
        n, out(dx), [](F u, F g) { return g * sigmoid<S>(u).slope; }, in(x), in(dy));
  }
  static void exp_(const void* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return exp_anywhere<S>(u); }, in(x));
  }
  static void exp_backward(const void* x, const void* dy, void* dx, Count n) {
    map(
        n, out(dx), [](F u, F g) { return g * exp_anywhere<S>(u); }, in(x), in(dy));
  }
  static void log_(const void* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return log(u); }, in(x));
  }
  static void log_backward(const void* x, const void* dy, void* dx, Count n) {
    map(
        n, out(dx), [](F u, F g) { return g / u; }, in(x), in(dy));
  }
  static void logistic_loss(const void* x, const void* t, void* y, Count n) {
    map(
        n, out(y), [](F u, F v) { return (u < 0.0f ? F{} : u) - u * v + log_of_1_plus(exp_for<S>(-abs(u))); },
        in(x), in(t));
  }
  static void logistic_slope(const void* x, const void* t, void* y, Count n) {
    map(
        n, out(y), [](F u, F v) { return sigmoid<S>(u).value - v; }, in(x), in(t));
  }
  static void tanh_(const void* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return tanh(u); }, in(x));
  }
  static void tanh_backward(const void* y, const void* dy, void* dx, Count n) {
    map(
        n, out(dx), [](F v, F g) { return g * (1.0f - v * v); }, in(y), in(dy));
  }
  // A NaN passes through: only numbers below zero are cut.
  static void relu(const void* x, void* y, Count n) {
    map(
        n, out(y), [](F u) { return u < 0.0f ? F{} : u; }, in(x));
  }
  static void relu_backward(const void* y, const void* dy, void* dx, Count n) {
    map(
        n, out(dx), [](F v, F g) { return v > 0.0f ? g : F{}; }, in(y), in(dy));
  }
  static void swiglu(const void* gate, const void* up, void* y, Count n) {
    map(
        n, out(y), [](F g, F u) { return g * sigmoid<S>(g).value * u; }, in(gate), in(up));
  }

  static void swiglu_backward(const void* gate, const void* up, const void* dy, void* dgate, void* dup,
                              Count n) {
    const auto step = [](F g, F u, F d, F& d_gate, F& d_up) {
      const Sigmoid s = sigmoid<S>(g);
      d_up = d * (g * s.value);
      d_gate = d * u * (s.value + g * s.slope);
    };
    F d_gate, d_up;
    Count i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const Pair g = load_pair<true>(in(gate) + i), u = load_pair<true>(in(up) + i),
                 d = load_pair<true>(in(dy) + i);
      Pair to_gate, to_up;
      step(g.a, u.a, d.a, to_gate.a, to_up.a);
      step(g.b, u.b, d.b, to_gate.b, to_up.b);
      store_pair<true>(out(dgate) + i, to_gate);
      store_pair<true>(out(dup) + i, to_up);
    }
    for (; i + lanes <= n; i += lanes) {
      step(load(in(gate) + i), load(in(up) + i), load(in(dy) + i), d_gate, d_up);
      store(out(dgate) + i, d_gate);
      store(out(dup) + i, d_up);
    }
    if (i == n) return;
    step(load_tail(in(gate) + i, n - i), load_tail(in(up) + i, n - i), load_tail(in(dy) + i, n - i), d_gate,
         d_up);
    store_tail(out(dgate) + i, d_gate, n - i);
    store_tail(out(dup) + i, d_up, n - i);
  }

  static void scaled_difference(const void* x, const void* y, float factor, void* dx, Count n) {
    map(
        n, out(dx), [factor](F u, F v) { return (u - v) * factor; }, in(x), in(y));
  }

  static void rotate(const void* x, const float* cosine, const float* sine, float direction, void* y,
                     Count half) {
    const S* a = in(x);
    const S* b = a + half;
    Count i = 0;
    for (; i + lanes <= half; i += lanes) {
      const F u = load(a + i), v = load(b + i), c = load(cosine + i), s = load(sine + i) * direction;
      store(out(y) + i, u * c - v * s);
      store(out(y) + half + i, v * c + u * s);
    }
    const Count left = half - i;
    if (left == 0) return;
    const F u = load_tail(a + i, left), v = load_tail(b + i, left);
    const F c = load_tail(cosine + i, left), s = load_tail(sine + i, left) * direction;
    store_tail(out(y) + i, u * c - v * s, left);
    store_tail(out(y) + half + i, v * c + u * s, left);
  }
};

template <class S>
constexpr ElementwiseOps table() {
  using L = ElementwiseLoops<S>;
  return {L::add,
          L::subtract,
          L::multiply,
          L::divide,
          L::scale,
          L::gelu_tanh,
          L::gelu_tanh_backward,
          L::gelu_erf,
          L::gelu_erf_backward,
          L::sigmoid_,
          L::sigmoid_backward,
          L::exp_,
          L::exp_backward,
          L::log_,
          L::log_backward,
          L::tanh_,
          L::tanh_backward,
          L::relu,
          L::relu_backward,
          L::swiglu,
          L::swiglu_backward,
          L::scaled_difference,
          L::logistic_loss,
          L::logistic_slope,
          L::rotate};
}

}  // namespace

const ElementwiseOps elementwise[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA

#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

SHERD_INLINE float inverse_root(float x) {
  return 1.0f / __builtin_sqrtf(x);
}

template <class S>
struct NormLoops {
  static const S* in(const void* x) { return static_cast<const S*>(x); }
  static S* out(void* x) { return static_cast<S*>(x); }

  /// A value that is stored as S and read again.
  SHERD_INLINE static F rounded(F f) {
    if constexpr (same_type<S, Bf16>)
      return (F)(round_to_bf16(f) & 0xffff0000u);
    else if constexpr (same_type<S, F16>)
      return from_f16(to_f16(f));
    else
      return f;
  }

  /// to[i] = f(xs[i]...), or with `onto` that, rounded, added to to[i].
  template <class Fn, class... In>
  SHERD_INLINE static void write(Fn f, Count n, S* to, bool onto, const In*... xs) {
    if (onto)
      map([=](F old, auto... x) { return old + rounded(f(x...)); }, n, to, static_cast<const S*>(to), xs...);
    else
      map(f, n, to, xs...);
  }

  static void layer_norm(const void* x, const void* weight, const void* bias, float eps, void* y,
                         float* mean_out, float* rstd_out, Count n) {
    const S* row = in(x);
    Sum32<S> sum, squares;
    for_each_32([&](int p, I, F u) { sum.part[p] += u; }, n, row);
    const float mean = sum.total() / static_cast<float>(n);
    for_each_32(
        [&](int p, I real, F u) {
          const F d = real ? u - mean : F{};
          squares.part[p] += d * d;
        },
        n, row);
    const float rstd = inverse_root(squares.total() / static_cast<float>(n) + eps);
    if (weight && bias)
      map([=](F u, F w, F b) { return (u - mean) * rstd * w + b; }, n, out(y), row, in(weight), in(bias));
    else if (weight)
      map([=](F u, F w) { return (u - mean) * rstd * w; }, n, out(y), row, in(weight));
    else if (bias)
      map([=](F u, F b) { return (u - mean) * rstd + b; }, n, out(y), row, in(bias));
    else
      map([=](F u) { return (u - mean) * rstd; }, n, out(y), row);
    *mean_out = mean;
    *rstd_out = rstd;
  }

  static void layer_norm_backward(const void* x, const void* weight, float mean, float rstd, const void* dy,
                                  void* dx, bool onto_dx, float* dweight, float* dbias, Count n) {
    if (dweight)
      map([=](F s, F u, F g) { return s + g * ((u - mean) * rstd); }, n, dweight,
          static_cast<const float*>(dweight), in(x), in(dy));
    if (dbias) map([](F s, F g) { return s + g; }, n, dbias, static_cast<const float*>(dbias), in(dy));
    if (!dx) return;
    Sum32<S> sum, product;
    const auto collect = [&](int p, F u, F g) {
      sum.part[p] += g;
      product.part[p] += g * ((u - mean) * rstd);
    };
    const float scale = 1.0f / static_cast<float>(n);
    const auto finish = [=](F u, F g, float average, float slope) {
      return (g - average - (u - mean) * rstd * slope) * rstd;
    };
    if (weight) {
      for_each_32([&](int p, I, F u, F g, F w) { collect(p, u, g * w); }, n, in(x), in(dy), in(weight));
      const float average = sum.total() * scale, slope = product.total() * scale;
      write([=](F u, F g, F w) { return finish(u, g * w, average, slope); }, n, out(dx), onto_dx, in(x),
            in(dy), in(weight));
    } else {
      for_each_32([&](int p, I, F u, F g) { collect(p, u, g); }, n, in(x), in(dy));
      const float average = sum.total() * scale, slope = product.total() * scale;
      write([=](F u, F g) { return finish(u, g, average, slope); }, n, out(dx), onto_dx, in(x), in(dy));
    }
  }

  static void rms_norm(const void* x, const void* weight, float shift, float eps, void* y, float* rstd_out,
                       Count n) {
    Sum32<S> squares;
    for_each_32([&](int p, I, F u) { squares.part[p] += u * u; }, n, in(x));
    const float rstd = inverse_root(squares.total() / static_cast<float>(n) + eps);
    if (weight)
      map([=](F u, F w) { return u * rstd * (w + shift); }, n, out(y), in(x), in(weight));
    else
      map([=](F u) { return u * rstd; }, n, out(y), in(x));
    *rstd_out = rstd;
  }

  static void rms_norm_backward(const void* x, const void* weight, float shift, float rstd, const void* dy,
                                void* dx, bool onto_dx, float* dweight, Count n) {
    if (dweight)
      map([=](F s, F u, F g) { return s + g * (u * rstd); }, n, dweight, static_cast<const float*>(dweight),
          in(x), in(dy));
    if (!dx) return;
    Sum32<S> product;
    const float scale = 1.0f / static_cast<float>(n);
    if (weight) {
      for_each_32([&](int p, I, F u, F g, F w) { product.part[p] += g * (w + shift) * (u * rstd); }, n, in(x),
                  in(dy), in(weight));
      const float slope = product.total() * scale;
      write([=](F u, F g, F w) { return (g * (w + shift) - u * rstd * slope) * rstd; }, n, out(dx), onto_dx,
            in(x), in(dy), in(weight));
    } else {
      for_each_32([&](int p, I, F u, F g) { product.part[p] += g * (u * rstd); }, n, in(x), in(dy));
      const float slope = product.total() * scale;
      write([=](F u, F g) { return (g - u * rstd * slope) * rstd; }, n, out(dx), onto_dx, in(x), in(dy));
    }
  }
};

template <class S>
constexpr NormOps table() {
  using L = NormLoops<S>;
  return {L::layer_norm, L::layer_norm_backward, L::rms_norm, L::rms_norm_backward};
}

}  // namespace

const NormOps norm[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA

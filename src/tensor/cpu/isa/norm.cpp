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
  SHERD_INLINE static void write(Count n, S* to, bool onto, Fn f, const In*... xs) {
    if (onto)
      map(
          n, to, [=](F old, auto... x) { return old + rounded(f(x...)); }, static_cast<const S*>(to), xs...);
    else
      map(n, to, f, xs...);
  }

  static void layer_norm(const void* x, const void* weight, const void* bias, float eps, void* y,
                         float* mean_out, float* rstd_out, Count n) {
    const S* row = in(x);
    Sum32<S> sum, squares;
    for_each_32(
        n, [&](int p, I, F u) { sum.part[p] += u; }, row);
    const float mean = sum.total() / static_cast<float>(n);
    for_each_32(
        n,
        [&](int p, I real, F u) {
          const F d = real ? u - mean : F{};
          squares.part[p] += d * d;
        },
        row);
    const float rstd = inverse_root(squares.total() / static_cast<float>(n) + eps);
    if (weight && bias)
      map(
          n, out(y), [=](F u, F w, F b) { return (u - mean) * rstd * w + b; }, row, in(weight), in(bias));
    else if (weight)
      map(
          n, out(y), [=](F u, F w) { return (u - mean) * rstd * w; }, row, in(weight));
    else if (bias)
      map(
          n, out(y), [=](F u, F b) { return (u - mean) * rstd + b; }, row, in(bias));
    else
      map(
          n, out(y), [=](F u) { return (u - mean) * rstd; }, row);
    *mean_out = mean;
    *rstd_out = rstd;
  }

  static void layer_norm_backward(const void* x, const void* weight, float mean, float rstd, const void* dy,
                                  void* dx, bool onto_dx, float* dweight, float* dbias, Count n) {
    if (dweight)
      map(
          n, dweight, [=](F s, F u, F g) { return s + g * ((u - mean) * rstd); },
          static_cast<const float*>(dweight), in(x), in(dy));
    if (dbias)
      map(
          n, dbias, [](F s, F g) { return s + g; }, static_cast<const float*>(dbias), in(dy));
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
      for_each_32(
          n, [&](int p, I, F u, F g, F w) { collect(p, u, g * w); }, in(x), in(dy), in(weight));
      const float average = sum.total() * scale, slope = product.total() * scale;
      write(
          n, out(dx), onto_dx, [=](F u, F g, F w) { return finish(u, g * w, average, slope); }, in(x), in(dy),
          in(weight));
    } else {
      for_each_32(
          n, [&](int p, I, F u, F g) { collect(p, u, g); }, in(x), in(dy));
      const float average = sum.total() * scale, slope = product.total() * scale;
      write(
          n, out(dx), onto_dx, [=](F u, F g) { return finish(u, g, average, slope); }, in(x), in(dy));
    }
  }

  static void rms_norm(const void* x, const void* weight, float eps, void* y, float* rstd_out, Count n) {
    Sum32<S> squares;
    for_each_32(
        n, [&](int p, I, F u) { squares.part[p] += u * u; }, in(x));
    const float rstd = inverse_root(squares.total() / static_cast<float>(n) + eps);
    if (weight)
      map(
          n, out(y), [=](F u, F w) { return u * rstd * w; }, in(x), in(weight));
    else
      map(
          n, out(y), [=](F u) { return u * rstd; }, in(x));
    *rstd_out = rstd;
  }

  static void rms_norm_backward(const void* x, const void* weight, float rstd, const void* dy, void* dx,
                                bool onto_dx, float* dweight, Count n) {
    if (dweight)
      map(
          n, dweight, [=](F s, F u, F g) { return s + g * (u * rstd); }, static_cast<const float*>(dweight),
          in(x), in(dy));
    if (!dx) return;
    Sum32<S> product;
    const float scale = 1.0f / static_cast<float>(n);
    if (weight) {
      for_each_32(
          n, [&](int p, I, F u, F g, F w) { product.part[p] += g * w * (u * rstd); }, in(x), in(dy),
          in(weight));
      const float slope = product.total() * scale;
      write(
          n, out(dx), onto_dx, [=](F u, F g, F w) { return (g * w - u * rstd * slope) * rstd; }, in(x),
          in(dy), in(weight));
    } else {
      for_each_32(
          n, [&](int p, I, F u, F g) { product.part[p] += g * (u * rstd); }, in(x), in(dy));
      const float slope = product.total() * scale;
      write(
          n, out(dx), onto_dx, [=](F u, F g) { return (g - u * rstd * slope) * rstd; }, in(x), in(dy));
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

#pragma once

#include <algorithm>
#include <cmath>

namespace sherd::engine {

/// A number with its derivatives by two others, what a model finds for a chosen text and for a rejected one:
/// arithmetic on it gives those of a loss (forward-mode differentiation).
struct Derived {
  double value = 0, by_chosen = 0, by_rejected = 0;

  Derived() = default;
  Derived(double number) : value(number) {}  // NOLINT(google-explicit-constructor): numbers are constants
  Derived(double v, double chosen, double rejected) : value(v), by_chosen(chosen), by_rejected(rejected) {}
  /// f(this), of value `v` and derivative `slope` there.
  Derived mapped(double v, double slope) const { return {v, slope * by_chosen, slope * by_rejected}; }
};

inline Derived operator+(const Derived& a, const Derived& b) {
  return {a.value + b.value, a.by_chosen + b.by_chosen, a.by_rejected + b.by_rejected};
}
inline Derived operator-(const Derived& a, const Derived& b) {
  return {a.value - b.value, a.by_chosen - b.by_chosen, a.by_rejected - b.by_rejected};
}
inline Derived operator-(const Derived& a) {
  return a.mapped(-a.value, -1);
}
inline Derived operator*(const Derived& a, const Derived& b) {
  return {a.value * b.value, a.by_chosen * b.value + b.by_chosen * a.value,
          a.by_rejected * b.value + b.by_rejected * a.value};
}
inline Derived operator/(const Derived& a, double b) {
  return a.mapped(a.value / b, 1 / b);
}

inline Derived square(const Derived& x) {
  return x * x;
}
inline Derived relu(const Derived& x) {
  return x.value <= 0 ? Derived() : x;  // a NaN stays one
}
inline Derived exp(const Derived& x) {
  const double e = std::exp(x.value);
  return x.mapped(e, e);
}
inline double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}
inline Derived sigmoid(const Derived& x) {
  const double s = sigmoid(x.value);
  return x.mapped(s, s * (1 - s));
}
/// log σ(x)
inline Derived log_sigmoid(const Derived& x) {
  const double v = std::min(x.value, 0.0) - std::log1p(std::exp(-std::abs(x.value)));
  return x.mapped(v, sigmoid(-x.value));
}
/// log(1 − e^x), for x < 0 (Mächler 2012, "Accurately computing log(1 − exp(−|a|))").
/// One that is not below is taken for the next below: a memorised text's.
inline Derived log_one_minus_exp(const Derived& of) {
  const Derived x = of.value > -1e-12 ? of.mapped(-1e-12, 1) : of;
  const double v =
      x.value > -0.6931471805599453 ? std::log(-std::expm1(x.value)) : std::log1p(-std::exp(x.value));
  return x.mapped(v, 1 / std::expm1(-x.value) * -1);
}

}  // namespace sherd::engine

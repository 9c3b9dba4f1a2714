#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <numbers>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

using tensor::Activation;
using tensor::Glu;
using tensor::Kernels;

double cdf(double x) {
  return 0.5 * std::erfc(-x / std::numbers::sqrt2);
}
double density(double x) {
  return std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
}
double gelu_inner(double x) {
  return std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
}
double logistic(double x) {
  return 1 / (1 + std::exp(-x));
}

/// The logistic form of ½(1 + tanh u): unlike it, exact in the lower tail.
double gelu_tanh(double x) {
  return x * logistic(2 * gelu_inner(x));
}
double gelu_tanh_slope(double x) {
  const double s = logistic(2 * gelu_inner(x));
  return s + x * s * (1 - s) * 2 * std::sqrt(2 / std::numbers::pi) * (1 + 3 * 0.044715 * x * x);
}

struct ElementwiseCase {
  const char* name;
  std::function<void(Kernels&, const Tensor&, const Tensor&, const Tensor&)> run;
  std::function<double(double, double)> want;
  double steps;        ///< roundings of the compute type that the result may be off
  double magnitude;    ///< size of the terms that cancel
  bool exact = false;  ///< the same bits on every device, not only in fp32
};

std::vector<ElementwiseCase> elementwise_cases() {
  return {
      {"add", [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) { k.add(a, b, o); },
       [](double a, double b) { return a + b; }, 1, 0, true},
      {"multiply", [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) { k.multiply(a, b, o); },
       [](double a, double b) { return a * b; }, 1, 0, true},
      {"scale", [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) { k.scale(a, -0.375, o); },
       [](double a, double) { return a * -0.375; }, 1, 0, true},
      {"gelu_tanh",
       [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) {
         k.activation(Activation::gelu_tanh, a, o);
       },
       [](double a, double) { return gelu_tanh(a); }, 8, 6},
      {"gelu_tanh_backward",
       [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) {
         k.activation_backward(Activation::gelu_tanh, a, b, o);
       },
       [](double a, double b) { return b * gelu_tanh_slope(a); }, 8, 120},
      {"gelu_erf",
       [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) {
         k.activation(Activation::gelu_erf, a, o);
       },
       [](double a, double) { return a * cdf(a); }, 8, 0},
      {"gelu_erf_backward",
       [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) {
         k.activation_backward(Activation::gelu_erf, a, b, o);
       },
       [](double a, double b) { return b * (cdf(a) + a * density(a)); }, 8, 8},
      {"subtract", [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) { k.subtract(a, b, o); },
       [](double a, double b) { return a - b; }, 1, 0, true},
      {"divide", [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) { k.divide(a, b, o); },
       [](double a, double b) { return a / b; }, 1, 0, true},
      {"sigmoid",
       [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) {
         k.activation(Activation::sigmoid, a, o);
       },
       [](double a, double) { return logistic(a); }, 8, 0},
      {"sigmoid_backward",
       [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) {
         k.activation_backward(Activation::sigmoid, a, b, o);
       },
       [](double a, double b) { return b * logistic(a) * logistic(-a); }, 8, 0},
      {"exp",
       [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) {
         k.activation(Activation::exp, a, o);
       },
       [](double a, double) { return std::exp(a); }, 4, 0},
      {"exp_backward",
       [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) {
         k.activation_backward(Activation::exp, a, b, o);
       },
       [](double a, double b) { return b * std::exp(a); }, 4, 0},
      {"log",
       [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) {
         k.activation(Activation::log, a, o);
       },
       [](double a, double) { return a < 0 ? std::nan("") : std::log(a); }, 4, 0},
      {"log_backward",
       [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) {
         k.activation_backward(Activation::log, a, b, o);
       },
       [](double a, double b) { return b / a; }, 1, 0, true},
      {"tanh", [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) { k.tanh(a, o); },
       [](double a, double) { return std::tanh(a); }, 4, 0},
      {"tanh_backward",
       [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) { k.tanh_backward(a, b, o); },
       [](double a, double b) { return b * (1 - a * a); }, 4, 40, true},
      {"relu", [](Kernels& k, const Tensor& a, const Tensor&, const Tensor& o) { k.relu(a, o); },
       [](double a, double) { return a > 0 ? a : 0; }, 0, 0, true},
      {"relu_backward",
       [](Kernels& k, const Tensor& a, const Tensor& b, const Tensor& o) { k.relu_backward(a, b, o); },
       [](double a, double b) { return a > 0 ? b : 0; }, 0, 0, true},
  };
}

/// Values that cover both tails, zeros of either sign and odd places of the tail loops.
std::vector<double> inputs(DType dtype, std::int64_t n, std::uint64_t stream) {
  std::vector<double> out = normals_in(dtype, n, stream, 3);
  const double special[] = {0.0, -0.0, 30, -30, 1e-4, -1e-4, 9.5, -9.5};
  for (std::size_t i = 0; i < std::size(special) && 2 * i < out.size(); ++i)
    out[out.size() - 1 - 2 * i] = rounded(special[i], dtype);
  return out;
}

class Elementwise : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, Elementwise, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(Elementwise, agrees_with_double_arithmetic_and_across_machines) {
  const DType dtype = GetParam();
  for (const std::int64_t n : {0, 1, 3, 16, 31, 33, 100, 70001}) {
    const std::vector<double> a = inputs(dtype, n, 1), b = inputs(dtype, n, 2);
    for (const ElementwiseCase& test : elementwise_cases()) {
      on_every_machine(
          [&](Machine& m) {
            Tensor out = m.empty({n}, dtype), in_place = m.of({n}, dtype, a);
            test.run(m.kernels, m.of({n}, dtype, a), m.of({n}, dtype, b), out);
            test.run(m.kernels, in_place, m.of({n}, dtype, b), in_place);
            return std::vector<Tensor>{out, in_place};
          },
          [&](const std::vector<Tensor>& got) {
            std::vector<double> want(a.size());
            for (std::size_t i = 0; i < a.size(); ++i) {
              want[i] = test.want(a[i], b[i]);
              if (dtype == DType::f16 && std::fabs(want[i]) >= 65520)
                want[i] = std::copysign(std::numeric_limits<double>::infinity(), want[i]);
            }
            expect_close(values_of(got[0]), want, dtype, test.steps, test.magnitude, test.name);
            EXPECT_EQ(std::memcmp(got[0].raw(), got[1].raw(), got[0].bytes()), 0) << test.name << " in place";
          },
          dtype == DType::f32 || test.exact ? Alike::to_the_bit : Alike::within_rounding);
      if (HasFatalFailure()) return;
    }
  }
}

/// act(u) and its slope, of the definitions.
std::pair<double, double> gate_of(Glu kind, double u) {
  if (kind == Glu::swiglu) {
    const double s = logistic(u);
    return {u * s, s + u * s * (1 - s)};
  }
  if (kind == Glu::geglu_erf) {
    const double cdf = 0.5 * std::erfc(-u / std::sqrt(2.0));
    return {u * cdf, cdf + u * std::exp(-u * u / 2) / std::sqrt(2 * std::numbers::pi)};
  }
  if (kind == Glu::swiglu_clamped) {
    const double g = std::min(u, 7.0), s = logistic(1.702 * g);
    return {g * s, u > 7 ? 0 : s + 1.702 * g * s * (1 - s)};
  }
  const double a = std::sqrt(2 / std::numbers::pi), inner = a * (u + 0.044715 * u * u * u),
               cdf = 1 / (1 + std::exp(-2 * inner));
  return {u * cdf, cdf + u * 2 * cdf * (1 - cdf) * a * (1 + 3 * 0.044715 * u * u)};
}

TEST_P(Elementwise, glu_forward_and_backward) {
  const DType dtype = GetParam();
  for (const Glu kind : {Glu::swiglu, Glu::geglu_tanh, Glu::geglu_erf, Glu::swiglu_clamped})
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 5}, Shape{2, 2, 48}, Shape{70, 517}, Shape{0, 4}}) {
      if (kind != Glu::swiglu && shape.rows() == 70) continue;
      const std::int64_t rows = shape.rows(), f = shape.back();
      std::vector<double> x = inputs(dtype, 2 * rows * f, 1);
      // Beyond the limits on either side, and at one.
      if (kind == Glu::swiglu_clamped && x.size() > 8)
        for (const auto& [i, value] : {std::pair(0, 9.5), {1, -9.5}, {2, 7.0}, {3, -7.0}})
          x[static_cast<std::size_t>(i)] = x[x.size() - 1 - static_cast<std::size_t>(i)] = value;
      const std::vector<double> dy = normals_in(dtype, rows * f, 2);
      on_every_machine(
          [&](Machine& m) {
            const Shape wide = shape.with_back(2 * f);
            Tensor in = m.of(wide, dtype, x), y = m.empty(shape, dtype), dx = m.empty(wide, dtype);
            m.kernels.glu(kind, in, y);
            m.kernels.glu_backward(kind, in, m.of(shape, dtype, dy), dx);
            return std::vector<Tensor>{y, dx};
          },
          [&](const std::vector<Tensor>& got) {
            std::vector<double> y(dy.size()), dx(x.size());
            for (std::int64_t r = 0; r < rows; ++r)
              for (std::int64_t i = 0; i < f; ++i) {
                const auto gate_at = static_cast<std::size_t>(2 * r * f + i),
                           up_at = gate_at + static_cast<std::size_t>(f);
                const auto out_at = static_cast<std::size_t>(r * f + i);
                const auto [value, slope] = gate_of(kind, x[gate_at]);
                const bool clamps = kind == Glu::swiglu_clamped;
                const double up = clamps ? std::clamp(x[up_at], -7.0, 7.0) + 1 : x[up_at];
                y[out_at] = value * up;
                dx[up_at] = clamps && std::abs(x[up_at]) > 7 ? 0 : dy[out_at] * value;
                dx[gate_at] = dy[out_at] * up * slope;
              }
            expect_close(values_of(got[0]), y, dtype, 8, kind == Glu::swiglu ? 0 : 16, "glu");
            expect_close(values_of(got[1]), dx, dtype, 8, 64, "glu_backward");
          });
      if (HasFatalFailure()) return;
    }
}

TEST(ElementwiseSpecials, not_a_number_passes_through_and_infinities_saturate) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : floating_dtypes)
    for (const auto& machine : all_machines()) {
      Machine& m = *machine;
      const Tensor x = m.of({3}, dtype, {nan, inf, -inf});
      Tensor y = m.empty({3}, dtype);
      m.kernels.tanh(x, y);
      EXPECT_TRUE(std::isnan(values_of(m.host(y))[0])) << m.name();
      EXPECT_EQ(values_of(m.host(y))[1], 1);
      EXPECT_EQ(values_of(m.host(y))[2], -1);
      m.kernels.relu(x, y);
      EXPECT_TRUE(std::isnan(values_of(m.host(y))[0])) << m.name();
      EXPECT_EQ(values_of(m.host(y))[1], inf);
      for (const Activation kind : {Activation::gelu_tanh, Activation::gelu_erf}) {
        m.kernels.activation(kind, x, y);
        EXPECT_TRUE(std::isnan(values_of(m.host(y))[0])) << m.name();
        EXPECT_EQ(values_of(m.host(y))[1], inf) << m.name();
      }
    }
}

TEST(ExponentialsAndLogarithms, reach_to_the_ends_of_their_ranges) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> x{0,         -0.0f,           inf, -inf, 88.5f, 88.722f, 88.9f, 1e30f,
                             0x1p-126f, 0x1.fffffep127f, 1,   -1};
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    const Tensor in = m.holding<float>({12}, x), exp = m.empty({12}, DType::f32),
                 log = m.empty({12}, DType::f32);
    m.kernels.activation(Activation::exp, in, exp);
    m.kernels.activation(Activation::log, in, log);
    const std::vector<double> e = values_of(m.host(exp)), l = values_of(m.host(log));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double v = static_cast<double>(x[i]), largest = static_cast<double>(0x1.fffffep127f);
      if (std::exp(v) > largest || std::exp(v) == 0)
        EXPECT_EQ(e[i], v > 0 ? static_cast<double>(inf) : 0.0) << m.name() << " of " << v;
      else
        EXPECT_NEAR(e[i] / std::exp(v), 1, 4e-7) << m.name() << " of " << v;
      if (v < 0)
        EXPECT_TRUE(std::isnan(l[i])) << m.name() << " of " << v;
      else if (v == 0 || std::isinf(v))
        EXPECT_EQ(l[i], std::log(v)) << m.name() << " of " << v;
      else
        EXPECT_NEAR(l[i], std::log(v), 1e-7 * (1e-3 + std::fabs(std::log(v)))) << m.name() << " of " << v;
    }
  }
}

TEST(ElementwiseErrors, name_the_kernel_and_what_differs) {
  Machine m(CpuIsa::portable, 1);
  const Tensor a = m.empty({2, 3}, DType::f32), b = m.empty({3, 2}, DType::f32),
               c = m.empty({2, 3}, DType::bf16);
  using testing::expect_error;
  expect_error(ErrorKind::usage, "add: shapes differ: [3, 2] and [2, 3]", [&] { m.kernels.add(a, b, a); });
  expect_error(ErrorKind::usage, "multiply: dtypes differ: bf16 and fp32",
               [&] { m.kernels.multiply(a, c, a); });
  expect_error(ErrorKind::usage, "tanh: an argument is not defined", [&] { m.kernels.tanh({}, a); });
  expect_error(ErrorKind::usage, "glu: [2, 3] does not hold", [&] { m.kernels.glu(Glu::swiglu, a, a); });
  expect_error(ErrorKind::usage, "must be floating, not int32", [&] {
    const Tensor ids = m.empty({2}, DType::i32);
    m.kernels.relu(ids, ids);
  });
}

/// Distance in units of the last place of fp32 at `want`.
double ulps(float got, double want) {
  const int exponent = std::max(-126, std::ilogb(want));
  return std::fabs(static_cast<double>(got) - want) / std::ldexp(1.0, exponent - 23);
}

TEST(VectorMath, stays_within_the_stated_units_in_the_last_place) {
  // Every 1021st float of the range, both signs.
  std::vector<float> x;
  for (std::uint32_t bits = std::bit_cast<std::uint32_t>(1e-6f); bits < std::bit_cast<std::uint32_t>(12.5f);
       bits += 1021)
    for (const float sign : {1.0f, -1.0f}) x.push_back(sign * std::bit_cast<float>(bits));
  for (float v = -87.3f; v < 0.3f; v += 0.00037f) x.push_back(v);
  const auto n = static_cast<std::int64_t>(x.size());
  for (int isa = 0; isa <= static_cast<int>(cpu_isa()); ++isa) {
    const auto& table = tensor::cpu::isa_table(static_cast<CpuIsa>(isa));
    std::vector<float> exp(x), tanh(x.size()), gelu(x.size()), log(x.size()), any_exp(x.size());
    table.softmax[tensor::cpu::storage_f32].gradient(exp.data(), n, 0.0f, 1.0f);
    table.elementwise[tensor::cpu::storage_f32].tanh(x.data(), tanh.data(), n);
    table.elementwise[tensor::cpu::storage_f32].gelu_erf(x.data(), gelu.data(), n);
    table.elementwise[tensor::cpu::storage_f32].log(x.data(), log.data(), n);
    table.elementwise[tensor::cpu::storage_f32].exp(x.data(), any_exp.data(), n);
    double worst_exp = 0, worst_tanh = 0, near_gelu = 0, far_gelu = 0, worst_log = 0, worst_any_exp = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double v = static_cast<double>(x[i]);
      worst_exp = std::max(worst_exp, ulps(exp[i], std::exp(v)));
      worst_tanh = std::max(worst_tanh, ulps(tanh[i], std::tanh(v)));
      worst_any_exp = std::max(worst_any_exp, ulps(any_exp[i], std::exp(v)));
      if (v > 0) worst_log = std::max(worst_log, ulps(log[i], std::log(v)));
      double& worst_gelu = v > -5 ? near_gelu : far_gelu;
      if (v > -12.5) worst_gelu = std::max(worst_gelu, ulps(gelu[i], v * cdf(v)));
    }
    EXPECT_LE(worst_exp, 1.5) << name_of(static_cast<CpuIsa>(isa));
    EXPECT_LE(worst_any_exp, 3.0) << name_of(static_cast<CpuIsa>(isa));
    EXPECT_LE(worst_log, 2.0) << name_of(static_cast<CpuIsa>(isa));
    EXPECT_LE(worst_tanh, 2.0) << name_of(static_cast<CpuIsa>(isa));
    EXPECT_LE(near_gelu, 5.5) << name_of(static_cast<CpuIsa>(isa));
    EXPECT_LE(far_gelu, 8.5) << name_of(static_cast<CpuIsa>(isa));
  }
}

}  // namespace
}  // namespace sherd::test

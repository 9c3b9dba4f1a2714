// Muon's directions, their orthogonal form and its scale, against plain loops in double.
#include "optim/muon.h"

#include <gtest/gtest.h>

#include <cmath>

#include "optim/description.h"
#include "optim/span_fixture.h"
#include "support/cpu_fixture.h"

namespace sherd::optim {
namespace {

using config::MuonScale;
using config::OptimizerType;
using tensor::Tensor;
using test::Cpu;
using Values = std::vector<double>;

Hyper muon() {
  return config::default_rule(OptimizerType::muon);
}

config::MuonOptions& options_of(Hyper& hyper) {
  return hyper.as<config::MuonOptions>();
}

struct Dense {
  std::int64_t rows, columns;
  Values x;
  double at(std::int64_t i, std::int64_t j) const { return x[static_cast<std::size_t>(i * columns + j)]; }
};

Dense product(const Dense& a, const Dense& b, bool transposed) {
  Dense out{a.rows, transposed ? b.rows : b.columns, {}};
  for (std::int64_t i = 0; i < out.rows; ++i)
    for (std::int64_t j = 0; j < out.columns; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < a.columns; ++k) sum += a.at(i, k) * (transposed ? b.at(j, k) : b.at(k, j));
      out.x.push_back(sum);
    }
  return out;
}

/// The published iteration, with X·Xᵀ whatever the shape, times step_scale()'s shape factor of 1.
Dense iterated(Dense x, const Hyper& hyper) {
  const auto& own = hyper.as<config::MuonOptions>();
  double squares = 0;
  for (const double value : x.x) squares += value * value;
  for (double& value : x.x) value /= std::max(std::sqrt(squares), own.ns_eps);
  const auto& [a, b, c] = own.ns_coefficients;
  for (std::int64_t step = 0; step < own.ns_steps; ++step) {
    const Dense gram = product(x, x, true), twice = product(gram, gram, false);
    const Dense once_x = product(gram, x, false), twice_x = product(twice, x, false);
    for (std::size_t i = 0; i < x.x.size(); ++i) x.x[i] = a * x.x[i] + b * once_x.x[i] + c * twice_x.x[i];
  }
  return x;
}

/// Singular values from 0.3 to 1 times one another, so that five steps reach them all.
Dense matrix_of(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  Dense out{rows, columns, {}};
  for (std::int64_t i = 0; i < rows * columns; ++i)
    out.x.push_back(0.2 * normal_at({seed, 5}, static_cast<std::uint64_t>(i)));
  for (std::int64_t i = 0; i < std::min(rows, columns); ++i)
    out.x[static_cast<std::size_t>(i * columns + i)] += 1;
  return out;
}

Values orthogonalized(Cpu& cpu, const Dense& m, DType dtype, const Hyper& hyper) {
  const Tensor x = cpu.convert(Tensor::of<double>(*cpu.device, {m.rows, m.columns}, std::span(m.x)), dtype);
  orthogonalize(x, hyper, *cpu.kernels);
  Values out = cpu.values(x);
  const double shape = std::sqrt(std::max(1.0, double(m.rows) / double(m.columns)));
  for (double& value : out) value *= step_scale(hyper, m.rows, m.columns) / shape;
  return out;
}

TEST(Muon, OrthogonalizesAsPublished) {
  Cpu cpu;
  Hyper cubic = muon(), other = muon();
  options_of(cubic).ns_coefficients = {1.5, -0.5, 0}, options_of(cubic).ns_steps = 6;
  options_of(other).ns_coefficients = {2, -1.5, 0.5}, options_of(other).ns_steps = 1;
  for (const Hyper& hyper : {muon(), cubic, other})
    for (const auto& [rows, columns] : {std::pair{16, 16}, {12, 40}, {70, 24}, {1, 9}, {9, 1}}) {
      const Dense x = matrix_of(rows, columns, 7);
      const Dense want = iterated(x, hyper);
      const Values wide = orthogonalized(cpu, x, DType::f32, hyper),
                   narrow = orthogonalized(cpu, x, DType::bf16, hyper);
      for (std::size_t i = 0; i < want.x.size(); ++i) {
        EXPECT_NEAR(wide[i], want.x[i], 3e-6) << rows << " x " << columns;
        EXPECT_NEAR(narrow[i], want.x[i], 0.04) << rows << " x " << columns;
      }
    }
}

TEST(Muon, MakesSingularValuesAboutOne) {
  Cpu cpu;
  const Dense x = matrix_of(20, 50, 3);
  const Dense o{20, 50, orthogonalized(cpu, x, DType::bf16, muon())};
  const Dense gram = product(o, o, true);
  for (std::int64_t i = 0; i < 20; ++i) {
    EXPECT_GT(gram.at(i, i), 0.4);
    EXPECT_LT(gram.at(i, i), 1.6);
  }
}

TEST(Muon, AMatrixOfZerosStaysOne) {
  Cpu cpu;
  for (const double value : orthogonalized(cpu, {4, 6, Values(24)}, DType::bf16, muon())) EXPECT_EQ(value, 0);
}

TEST(Muon, ThreadsDoNotShow) {
  Cpu one(1), three(3);
  const Dense x = matrix_of(130, 300, 3);
  for (const DType dtype : {DType::f32, DType::bf16})
    EXPECT_EQ(orthogonalized(one, x, dtype, muon()), orthogonalized(three, x, dtype, muon()));
}

TEST(Muon, ScalesAsNamed) {
  Hyper hyper = muon();
  options_of(hyper).ns_coefficients[2] = 1;  // no constant beside it
  EXPECT_DOUBLE_EQ(step_scale(hyper, 32, 8), 2);
  EXPECT_DOUBLE_EQ(step_scale(hyper, 8, 32), 1);
  options_of(hyper).adjust_lr_fn = MuonScale::match_rms_adamw;
  EXPECT_DOUBLE_EQ(step_scale(hyper, 25, 8), 1);
  EXPECT_DOUBLE_EQ(step_scale(hyper, 8, 100), 2);
  options_of(hyper).adjust_lr_fn = MuonScale::spectral_unclamped;
  EXPECT_DOUBLE_EQ(step_scale(hyper, 32, 8), 2);
  EXPECT_DOUBLE_EQ(step_scale(hyper, 8, 32), 0.5);
}

TEST(Muon, FlopsAreThoseOfThreeProducts) {
  EXPECT_EQ(orthogonalize_flops(10, 30, muon()), 5 * (2 * 2 * 10 * 10 * 30 + 2 * 10 * 10 * 10));
  EXPECT_EQ(orthogonalize_flops(30, 10, muon()), orthogonalize_flops(10, 30, muon()));
}

double as_double(const void* from, std::size_t i, DType dtype) {
  if (dtype == DType::f32) return static_cast<const float*>(from)[i];
  return static_cast<float>(static_cast<const bf16*>(from)[i]);
}

TEST(Muon, DirectionsFollowTheFormulaAndLeaveWeightsAlone) {
  Arena arena(2);
  for (const bool nesterov : {false, true})
    for (const DType to : {DType::f32, DType::bf16})
      for (const DType moments : {DType::f32, DType::bf16}) {
        Hyper hyper = muon();
        options_of(hyper).nesterov = nesterov, options_of(hyper).momentum = 0.75;
        const std::size_t n = 70'003;
        Span span = random_span(n, DType::bf16, DType::bf16, moments);
        const Span before = span;
        std::vector<float> out(n);
        SpanUpdate update = span.all();
        update.grad_factor = 0.5;
        EXPECT_TRUE(directions(update, hyper, 3, out.data(), to, arena));
        EXPECT_EQ(span.master, before.master);
        EXPECT_TRUE(span.param == before.param);
        for (std::size_t i = 0; i < n; ++i) {
          const double g = 0.5 * before.grad.get(i), b = 0.75 * before.first.get(i) + 0.25 * g;
          const double u = nesterov ? 0.25 * g + 0.75 * b : b;
          ASSERT_NEAR(span.first.get(i), b, moments == DType::f32 ? 1e-7 : std::abs(b) / 128 + 1e-7);
          ASSERT_NEAR(as_double(out.data(), i, to), u, to == DType::f32 ? 1e-7 : std::abs(u) / 255 + 1e-7);
        }
      }
}

TEST(Muon, CutsAndThreadsDoNotShowInDirections) {
  Arena one(1), four(4);
  const std::int64_t n = 100'100;
  const auto size = static_cast<std::size_t>(n);
  for (const DType moments : {DType::f32, DType::bf16}) {
    Span whole = random_span(size, DType::f16, DType::bf16, moments), cut = whole;
    std::vector<std::uint16_t> expected(size), got(size);
    directions(whole.all(), muon(), 3, expected.data(), DType::bf16, four);
    for (std::int64_t begin = 0, count = 61; begin < n; begin += count, count *= 3)
      directions(cut.update(begin, std::min(begin + count, n)), muon(), 3, got.data() + begin, DType::bf16,
                 one);
    EXPECT_EQ(got, expected);
    EXPECT_TRUE(cut == whole);
  }
}

TEST(Muon, TellsOfWhatIsNotFinite) {
  Arena arena(1);
  Span span = random_span(100, DType::f32, DType::bf16);
  std::vector<std::uint16_t> out(100);
  EXPECT_TRUE(directions(span.all(), muon(), 1, out.data(), DType::bf16, arena));
  span.set_grad(41, std::numeric_limits<float>::infinity());
  EXPECT_FALSE(directions(span.all(), muon(), 1, out.data(), DType::bf16, arena));
}

TEST(Muon, WeightsMoveByGradientDescent) {
  Hyper hyper = muon();
  hyper.lr = 0.5, hyper.weight_decay = 0.25;
  options_of(hyper).adam_lr = 0.125, options_of(hyper).beta1 = 0.7, options_of(hyper).eps = 1e-3;
  const Hyper step = step_rule(hyper), rest = beside_muon(hyper);
  EXPECT_EQ(step.type, OptimizerType::sgd);
  EXPECT_EQ(step.lr, 0.5);
  EXPECT_EQ(step.weight_decay, 0.25);
  EXPECT_EQ(step.as<config::SgdOptions>().momentum, 0);
  EXPECT_EQ(rest.type, OptimizerType::adamw);
  EXPECT_EQ(rest.lr, 0.125);
  EXPECT_EQ(rest.weight_decay, 0.25);
  EXPECT_EQ(rest.as<config::AdamOptions>().beta1, 0.7);
  EXPECT_EQ(rest.as<config::AdamOptions>().eps, 1e-3);
  options_of(hyper).adam_lr.reset();
  EXPECT_EQ(beside_muon(hyper).lr, 0.5);
}

}  // namespace
}  // namespace sherd::optim

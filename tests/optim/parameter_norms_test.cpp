// The norms that rules take of a parameter before they update it, against their formulas in double.
#include "optim/parameter_norms.h"

#include <gtest/gtest.h>

#include <cmath>

#include "optim/description.h"
#include "optim/span_fixture.h"

namespace sherd::optim {
namespace {

using config::OptimizerType;

std::vector<Hyper> measuring_rules() {
  std::vector<Hyper> out;
  for (const Hyper& hyper : every_rule())
    if (measures(describe(hyper))) out.push_back(hyper);
  return out;
}

/// The value that the rule takes a norm of, in double.
double measured(const Hyper& h, int step, double p, double g, double m, double v) {
  if (h.type == OptimizerType::lars) return g;
  const auto own = std::visit(
      [](const auto& options) {
        if constexpr (std::is_base_of_v<config::Moments, std::decay_t<decltype(options)>>)
          return static_cast<config::Moments>(options);
        else
          return config::Moments();
      },
      h.options);
  m = own.beta1 * m + (1 - own.beta1) * g;
  v = own.beta2 * v + (1 - own.beta2) * g * g;
  const bool corrects = h.type != OptimizerType::onebitlamb;
  const double c1 = corrects ? 1 - std::pow(own.beta1, step) : 1,
               c2 = corrects ? 1 - std::pow(own.beta2, step) : 1;
  return m / c1 / (std::sqrt(v / c2) + own.eps) + h.weight_decay * p;
}

std::vector<std::int64_t> words(const NormSums& sums) {
  std::vector<std::int64_t> out = sums.weight.to_words();
  const std::vector<std::int64_t> more = sums.measured.to_words();
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

NormSums measured_by(CpuIsa isa, const SpanUpdate& span, const Hyper& hyper, Arena& arena) {
  NormSums out;
  measure(span, hyper, 3, arena, out, isa);
  return out;
}

TEST(ParameterNorms, FollowTheFormulasAndChangeNothing) {
  Arena arena(2);
  ASSERT_GE(measuring_rules().size(), 3u);
  for (const Hyper& hyper : measuring_rules())
    for (const DType moments : {DType::f32, DType::bf16})
      for (const bool split : {false, true}) {
        const std::size_t n = 5003;
        Span span = random_span(n, DType::bf16, DType::bf16, moments);
        double weights = 0, others = 0;
        for (std::size_t i = 0; i < n; ++i) {
          weights += double(span.master[i]) * span.master[i];
          others += std::pow(measured(hyper, 3, span.master[i], 0.5 * span.grad.get(i), span.first.get(i),
                                      span.second.get(i)),
                             2);
        }
        if (split) span = span.as_split(arena);
        const Span before = span;
        SpanUpdate update = span.all();
        update.grad_factor = 0.5;
        const NormSums sums = measured_by(cpu_isa(), update, hyper, arena);
        EXPECT_NEAR(sums.weight.value() / weights, 1, 1e-12) << config::name_of(hyper.type);
        EXPECT_NEAR(sums.measured.value() / others, 1, 1e-6) << config::name_of(hyper.type);
        EXPECT_TRUE(span == before);
      }
}

TEST(ParameterNorms, CutsThreadsAndInstructionSetsDoNotShow) {
  Arena one(1), four(4);
  const std::int64_t n = 100'100;
  for (const Hyper& hyper : measuring_rules()) {
    Span span = random_span(static_cast<std::size_t>(n), DType::f16, DType::bf16, DType::bf16);
    const auto want = words(measured_by(CpuIsa::portable, span.all(), hyper, one));
    for (const CpuIsa isa : every_isa()) EXPECT_EQ(words(measured_by(isa, span.all(), hyper, four)), want);
    NormSums cut;
    for (std::int64_t begin = 0, size = 64; begin < n; begin += size, size *= 3)
      measure(span.update(begin, std::min(begin + size, n)), hyper, 3, one, cut, cpu_isa());
    EXPECT_EQ(words(cut), want);
  }
}

TEST(TrustRatio, IsThatOfThePapers) {
  Hyper lamb = config::default_rule(OptimizerType::lamb),
        nvlamb = config::default_rule(OptimizerType::nvlamb),
        lars = config::default_rule(OptimizerType::lars);
  EXPECT_EQ(trust_ratio(lamb, 3, 2, false), 1.5);
  EXPECT_EQ(trust_ratio(lamb, 300, 2, true), 10);
  EXPECT_EQ(trust_ratio(lamb, 1e-3, 2, true), 0.01);
  EXPECT_EQ(trust_ratio(nvlamb, 300, 2, true), 150);
  for (const Hyper& hyper : {lamb, nvlamb, lars}) {
    EXPECT_EQ(trust_ratio(hyper, 0, 2, true), 1);
    EXPECT_EQ(trust_ratio(hyper, 2, 0, true), 1);
  }
  auto& own = lars.as<config::LarsOptions>();
  own.eps = 0.5, lars.weight_decay = 0.25, own.trust_coefficient = 0.125, lars.lr = 0.5;
  EXPECT_EQ(trust_ratio(lars, 4, 0.5, true), 0.25);  // 0.125·4/(0.5 + 0.25·4 + 0.5)
  EXPECT_EQ(trust_ratio(lars, 4, 0.5, false), 1) << "a vector";
  own.clip = true;
  EXPECT_EQ(trust_ratio(lars, 4, 0.5, true), 0.5) << "times lr: 0.25";
  lars.lr = 0.125;
  EXPECT_EQ(trust_ratio(lars, 4, 0.5, true), 1) << "times lr: lr";
  EXPECT_EQ(trust_ratio(config::default_rule(OptimizerType::adamw), 3, 2, true), 1);
}

}  // namespace
}  // namespace sherd::optim

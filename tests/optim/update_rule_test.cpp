#include "optim/update_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "optim/description.h"
#include "optim/long_traces.h"
#include "optim/rules/list.h"
#include "optim/span_fixture.h"
#include "optim/torch_traces.h"
#include "support/expect_error.h"

namespace sherd::optim {
namespace {

using config::OptimizerType;

// ---- against PyTorch ----

template <std::size_t Steps, std::size_t Size>
void expect_trace(const double (&want)[Steps][Size], const Hyper& hyper) {
  Arena arena(1);
  Span span(Size, DType::f32, DType::f32);
  for (std::size_t i = 0; i < Size; ++i) span.master[i] = (3.0f * static_cast<float>(i) - 7.0f) / 8.0f;
  for (std::size_t step = 0; step < Steps; ++step) {
    // Gradients come with a loss scale of 64, which the factor takes away again.
    for (std::size_t i = 0; i < Size; ++i)
      span.set_grad(i, static_cast<float>(64 * torch_traces::gradients[step][i]));
    SpanUpdate update_all = span.all();
    update_all.grad_factor = 1.0 / 64;
    ASSERT_TRUE(update(update_all, hyper, static_cast<std::int64_t>(step) + 1, arena));
    for (std::size_t i = 0; i < Size; ++i)
      EXPECT_NEAR(span.master[i], want[step][i], 1e-6) << "step " << step << ", element " << i;
  }
}

Hyper adam(OptimizerType type, double lr, double b1, double b2, double eps, double wd) {
  Hyper h;
  h.type = type, h.lr = lr, h.weight_decay = wd;
  auto& own = h.as<config::AdamOptions>();
  own.beta1 = b1, own.beta2 = b2, own.eps = eps, own.adam_w_mode = false;
  return h;
}

Hyper sgd(double wd, double momentum, bool nesterov) {
  Hyper h = config::default_rule(OptimizerType::sgd);
  h.lr = 0.1, h.weight_decay = wd;
  h.options = config::SgdOptions{.momentum = momentum, .nesterov = nesterov};
  return h;
}

TEST(UpdateRule, FollowsPyTorch) {
  expect_trace(torch_traces::adam, adam(OptimizerType::adam, 0.01, 0.9, 0.999, 1e-8, 0));
  expect_trace(torch_traces::adam_l2, adam(OptimizerType::adam, 0.02, 0.8, 0.95, 1e-6, 0.1));
  expect_trace(torch_traces::adamw, adam(OptimizerType::adamw, 0.02, 0.9, 0.95, 1e-8, 0.1));
  expect_trace(torch_traces::sgd, sgd(0, 0, false));
  expect_trace(torch_traces::sgd_decay, sgd(0.05, 0, false));
  expect_trace(torch_traces::sgd_momentum, sgd(0.05, 0.9, false));
  expect_trace(torch_traces::sgd_nesterov, sgd(0.05, 0.9, true));
}

// Weights and gradients of make_traces.py.
double long_gradient(int step, int i) {
  return (2 * ((37 * step + 11 * i + 5 + (step * step * i) % 7) % 41) - 41) / 64.0;
}

template <std::size_t Rows, std::size_t Size>
void expect_long_trace(const double (&want)[Rows][Size], const Hyper& hyper) {
  Arena arena(1);
  Span span(Size, DType::f32, DType::f32);
  for (std::size_t i = 0; i < Size; ++i) {
    span.master[i] = (3.0f * static_cast<float>(i) - 7.0f) / 8.0f;
    span.first.set(i, static_cast<float>(describe(hyper).states.at(0).initial));
  }
  std::size_t row = 0;
  for (int step = 1; step <= long_traces::steps; ++step) {
    for (std::size_t i = 0; i < Size; ++i)
      span.set_grad(i, static_cast<float>(8 * long_gradient(step, static_cast<int>(i))));
    SpanUpdate update_all = span.all();
    update_all.grad_factor = 1.0 / 8;
    ASSERT_TRUE(update(update_all, hyper, step, arena));
    if (step != long_traces::kept[row]) continue;
    for (std::size_t i = 0; i < Size; ++i)
      ASSERT_NEAR(span.master[i], want[row][i], 1e-6 * std::max(1.0, std::abs(want[row][i])))
          << "step " << step << ", element " << i;
    ++row;
  }
  EXPECT_EQ(row, Rows);
}

TEST(UpdateRule, AdagradFollowsPyTorchOver50Steps) {
  const auto adagrad = [](double lr, double lr_decay, double decay, double initial, double eps) {
    Hyper h = config::default_rule(OptimizerType::adagrad);
    h.lr = lr, h.weight_decay = decay;
    h.options =
        config::AdagradOptions{.lr_decay = lr_decay, .initial_accumulator_value = initial, .eps = eps};
    return h;
  };
  expect_long_trace(long_traces::adagrad, config::default_rule(OptimizerType::adagrad));
  expect_long_trace(long_traces::adagrad_lr_decay, adagrad(0.1, 0.05, 0, 0, 1e-10));
  expect_long_trace(long_traces::adagrad_weight_decay, adagrad(0.05, 0, 0.1, 0, 1e-10));
  expect_long_trace(long_traces::adagrad_initial, adagrad(0.1, 0, 0, 0.3, 1e-10));
  expect_long_trace(long_traces::adagrad_eps, adagrad(0.1, 0, 0, 0, 0.05));
  expect_long_trace(long_traces::adagrad_all, adagrad(0.2, 0.02, 0.05, 0.1, 1e-3));
}

Hyper lion(double lr, double beta1, double beta2, double decay) {
  Hyper h = config::default_rule(OptimizerType::lion);
  h.lr = lr, h.weight_decay = decay;
  h.betas()->beta1 = beta1, h.betas()->beta2 = beta2;
  return h;
}

TEST(UpdateRule, LionFollowsDeepSpeedOver50Steps) {
  expect_long_trace(long_traces::lion, config::default_rule(OptimizerType::lion));
  expect_long_trace(long_traces::lion_decay, lion(0x1p-7, 0.9, 0.99, 0x1p-3));
  expect_long_trace(long_traces::lion_betas, lion(0x1p-6, 0.95, 0.8, 0x1p-2));
}

TEST(UpdateRule, LionFollowsThePaperOver50Steps) {
  expect_long_trace(long_traces::lion_published, lion(0.01, 0.9, 0.99, 0.1));
}

TEST(UpdateRule, LionLeavesWeightsWithoutGradientsAlone) {
  Arena arena(1);
  Span span(40, DType::f32, DType::bf16);
  for (std::size_t i = 0; i < 40; ++i) span.master[i] = 1, span.set_grad(i, i % 2 == 0 ? 0.0f : -0.0f);
  span.set_grad(3, 1e-20f), span.set_grad(38, -1e20f);
  ASSERT_TRUE(update(span.all(), lion(0.25, 0.9, 0.99, 0), 1, arena));
  for (std::size_t i = 0; i < 40; ++i)
    EXPECT_EQ(span.master[i], i == 3 ? 0.75f : i == 38 ? 1.25f : 1.0f) << i;
}

// ---- against the formulas in double ----

struct Exact {
  double p, m, v;
};

Exact adam_in_double(Exact x, double g, const Hyper& h, int step) {
  if (!h.decoupled_decay()) g += h.weight_decay * x.p;
  const auto& own = h.as<config::AdamOptions>();
  x.m = own.beta1 * x.m + (1 - own.beta1) * g;
  x.v = own.beta2 * x.v + (1 - own.beta2) * g * g;
  const double c1 = own.bias_correction ? 1 - std::pow(own.beta1, step) : 1;
  const double c2 = own.bias_correction ? 1 - std::pow(own.beta2, step) : 1;
  if (h.decoupled_decay()) x.p -= h.lr * h.weight_decay * x.p;
  x.p -= h.lr * (x.m / c1) / (std::sqrt(x.v / c2) + own.eps);
  return x;
}

TEST(UpdateRule, AdamFollowsTheFormulasInDouble) {
  Arena arena(2);
  for (const bool decoupled : {false, true})
    for (const bool correct : {false, true}) {
      Hyper h;
      h.type = decoupled ? OptimizerType::adamw : OptimizerType::adam, h.weight_decay = 0.1;
      auto& own = h.as<config::AdamOptions>();
      own.adam_w_mode = false, own.bias_correction = correct;
      Span span = random_span(3001, DType::f32, DType::f32);
      std::vector<Exact> exact;
      for (std::size_t i = 0; i < span.master.size(); ++i)
        exact.push_back({span.master[i], span.first.get(i), span.second.get(i)});
      for (int step = 1; step <= 4; ++step) {
        ASSERT_TRUE(update(span.all(), h, step, arena));
        for (std::size_t i = 0; i < exact.size(); ++i) {
          exact[i] = adam_in_double(exact[i], span.grad.get(i), h, step);
        }
      }
      for (std::size_t i = 0; i < exact.size(); ++i) {
        ASSERT_NEAR(span.master[i], exact[i].p, 4e-7 * std::abs(exact[i].p) + 4e-8) << i;
        ASSERT_NEAR(span.first.get(i), exact[i].m, 1e-6 * std::abs(exact[i].m) + 1e-8) << i;
        ASSERT_NEAR(span.second.get(i), exact[i].v, 1e-6 * exact[i].v) << i;
      }
    }
}

// ---- equal to the bit ----

TEST(UpdateRule, InstructionSetsAgreeToTheBit) {
  Arena arena(1);
  for (const Hyper& h : every_rule())
    for (const DType grads : {DType::f32, DType::bf16, DType::f16})
      for (const DType params : {DType::f32, DType::bf16, DType::f16}) {
        const Span start = random_span(1037, grads, params);
        Span want = start;
        for (int step = 1; step <= 3; ++step)
          ASSERT_TRUE(update(want.all(), h, step, arena, CpuIsa::portable));
        ASSERT_FALSE(want == start);
        for (const CpuIsa isa : {CpuIsa::avx2, CpuIsa::avx512}) {
          if (isa > cpu_isa()) continue;  // not on this processor
          Span got = start;
          for (int step = 1; step <= 3; ++step) ASSERT_TRUE(update(got.all(), h, step, arena, isa));
          EXPECT_TRUE(got == want) << name_of(isa) << ", gradients " << name_of(grads) << ", copy "
                                   << name_of(params);
        }
      }
}

TEST(UpdateRule, CutsAndThreadsDoNotShow) {
  Arena one(1), four(4);
  const std::size_t n = 200'003;
  for (const Hyper& h : every_rule()) {
    const Span start = random_span(n, DType::bf16, DType::bf16);
    Span whole = start, threaded = start, cut = start;
    ASSERT_TRUE(update(whole.all(), h, 7, one));
    ASSERT_TRUE(update(threaded.all(), h, 7, four));
    std::int64_t begin = 0;
    for (std::int64_t size = 1; begin < static_cast<std::int64_t>(n); size = size * 3 + 1) {
      const std::int64_t end = std::min<std::int64_t>(begin + size, static_cast<std::int64_t>(n));
      ASSERT_TRUE(update(cut.update(begin, end), h, 7, one));
      begin = end;
    }
    EXPECT_TRUE(threaded == whole);
    EXPECT_TRUE(cut == whole);
  }
}

TEST(UpdateRule, StreamedCopiesAreTheSame) {
  Arena arena(2);
  Hyper h;
  const std::size_t n = (std::size_t{1} << 22) + 77;  // long enough to be written past the caches
  Span whole(n, DType::bf16, DType::bf16);
  for (std::size_t i = 0; i < n; ++i) {
    whole.master[i] = static_cast<float>(i % 8191) * 1.1e-4f;
    whole.set_grad(i, static_cast<float>(i % 251) * 1e-3f);
  }
  Span cut = whole;
  ASSERT_TRUE(update(whole.all(), h, 1, arena));
  const std::int64_t half = 1 << 21;
  ASSERT_TRUE(update(cut.update(0, half), h, 1, arena));
  ASSERT_TRUE(update(cut.update(half, static_cast<std::int64_t>(n)), h, 1, arena));
  EXPECT_TRUE(cut == whole);
}

TEST(UpdateRule, CopiesRoundAsMastersDo) {
  Arena arena(1);
  Hyper h = config::default_rule(OptimizerType::sgd);
  h.lr = 0;
  // The second is a tie for bf16 (away from zero), the third one for fp16 (to even).
  const std::vector<float> values = {1.0f,     0x1.01p0f, 0x1.002p0f, -0x1.01p0f,
                                     3.14159f, -65503.0f, 6e-8f,      0.0f};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Span span(values.size(), DType::f32, dtype);
    span.master = values;
    ASSERT_TRUE(update(span.all(), h, 1, arena));
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, span.param.bytes.data() + 2 * i, 2);
      EXPECT_EQ(bits, dtype == DType::bf16 ? round_master_to_bf16(values[i]).bits : f16(values[i]).bits)
          << values[i];
      EXPECT_EQ(span.master[i], values[i]);
    }
  }
  EXPECT_NE(round_master_to_bf16(0x1.01p0f).bits,
            bf16(0x1.01p0f).bits);  // or the case above would say nothing
}

// ---- what it must notice ----

struct Poison {
  const char* what;
  DType param_dtype;
  float master, grad, second;
};

TEST(UpdateRule, ReportsNonFiniteUpdates) {
  Arena arena(2);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Poison> poisons = {{"NaN gradient", DType::f32, 1, nan, 0},
                                       {"infinite gradient", DType::bf16, 1, inf, 0},
                                       {"NaN weight", DType::f32, nan, 0, 0},
                                       {"second moment overflows", DType::f32, 1, 1e30f, 0},
                                       {"bf16 copy overflows", DType::bf16, 3.4e38f, 0, 0},
                                       {"fp16 copy overflows", DType::f16, 65520.0f, 0, 0}};
  for (const std::size_t n : {std::size_t{5}, std::size_t{100'001}})
    for (const Poison& poison : poisons)
      for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        SCOPED_TRACE(cat(poison.what, " at ", at, " of ", n));
        Hyper h;
        h.lr = 1e-4;
        Span span(n, DType::f32, poison.param_dtype);
        ASSERT_TRUE(update(span.all(), h, 1, arena));
        span.master[at] = poison.master;
        span.second.set(at, poison.second);
        span.set_grad(at, poison.grad);
        EXPECT_FALSE(update(span.all(), h, 2, arena));
      }
  Hyper momentum = sgd(0, 0.9, false);
  momentum.lr = 0;
  Span span(9, DType::f32, DType::f32);
  span.first.set(3, 3.4e38f);
  span.set_grad(3, 3e38f);
  EXPECT_FALSE(update(span.all(), momentum, 1, arena));
  Span largest(9, DType::f32, DType::bf16);
  largest.master[0] = std::bit_cast<float>(0x7f7f7fffu);  // the last that rounds down to a finite bf16
  EXPECT_TRUE(update(largest.all(), sgd(0, 0, false), 1, arena));
}

TEST(UpdateRule, EveryRuleReportsNonFiniteGradients) {
  Arena arena(1);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Hyper& h : every_rule())
    for (const DType moments : {DType::f32, DType::bf16})
      for (const float bad : {inf, -inf, nan})
        for (const std::size_t n : {std::size_t{3}, std::size_t{1000}}) {
          Span span = random_span(n, DType::f32, DType::bf16, moments);
          ASSERT_TRUE(update(span.all(), h, 1, arena));
          span.set_grad(n / 2, bad);
          EXPECT_FALSE(update(span.all(), h, 2, arena)) << config::name_of(h.type) << " " << bad;
        }
}

TEST(UpdateRule, PaddingLanesDoNotCount) {
  Arena arena(1);
  for (Hyper h : every_rule()) {
    std::visit(
        [](auto& own) {
          if constexpr (requires { own.eps; }) own.eps = 0;  // 0/0 in lanes past the end
        },
        h.options);
    for (const DType moments : {DType::f32, DType::bf16})
      for (std::size_t n = 1; n < 40; ++n) {
        Span span = random_span(n, DType::f32, DType::bf16, moments);
        EXPECT_TRUE(update(span.all(), h, 1, arena)) << n;
      }
  }
}

TEST(UpdateRule, DecayIsPerSpan) {
  Arena arena(1);
  for (const Hyper& h : every_rule()) {
    if (takes_matrices(describe(h))) continue;  // decays in step_rule()
    Hyper without = h;
    without.weight_decay = 0;
    Span flagged = random_span(100, DType::f32, DType::f32), plain = flagged, decayed = flagged;
    SpanUpdate u = flagged.all();
    u.decay = false;
    update(u, h, 1, arena);
    update(plain.all(), without, 1, arena);
    update(decayed.all(), h, 1, arena);
    EXPECT_TRUE(flagged == plain);
    EXPECT_FALSE(flagged == decayed);
  }
}

TEST(UpdateRule, DescribesItself) {
  const auto elementwise = [](const char* type, std::vector<State> states) {
    return Description{type, std::move(states), {Phase::elementwise}};
  };
  EXPECT_EQ(describe(adam(OptimizerType::adam, 0.01, 0.9, 0.999, 1e-8, 0)),
            elementwise("Adam", {{"exp_avg", 0}, {"exp_avg_sq", 0}}));
  EXPECT_EQ(describe(Hyper()), elementwise("AdamW", {{"exp_avg", 0}, {"exp_avg_sq", 0}}));
  EXPECT_EQ(describe(sgd(0, 0.9, false)), elementwise("SGD", {{"momentum_buffer", 0}}));
  EXPECT_EQ(describe(sgd(0, 0, false)), elementwise("SGD", {}));
  EXPECT_EQ(describe(lion(1, 0.9, 0.99, 0)), elementwise("Lion", {{"exp_avg", 0}}));
  Hyper adagrad = config::default_rule(OptimizerType::adagrad);
  adagrad.as<config::AdagradOptions>().initial_accumulator_value = 0.25;
  EXPECT_EQ(describe(adagrad), elementwise("Adagrad", {{"sum", 0.25}}));
  for (const auto& [type, states] :
       {std::pair(OptimizerType::lamb, std::vector<State>{{"exp_avg"}, {"exp_avg_sq"}}),
        {OptimizerType::nvlamb, {{"exp_avg"}, {"exp_avg_sq"}}},
        {OptimizerType::lars, {{"momentum_buffer"}}}}) {
    Description measured = elementwise(config::name_of(type), states);
    measured.phases = {Phase::parameter_norms, Phase::elementwise};
    EXPECT_EQ(describe(config::default_rule(type)), measured);
  }
  Hyper one_bit = config::default_rule(OptimizerType::onebitadam);
  one_bit.as<config::OneBitAdamOptions>().freeze_step = 7;
  Description exchanged = elementwise("OneBitAdam", {{"exp_avg"},
                                                     {"exp_avg_sq"},
                                                     {"worker_error", 0, OverReplicas::own},
                                                     {"server_error", 0, OverReplicas::spread}});
  exchanged.freeze_step = 7;
  exchanged.frozen_phases = {Phase::compress, Phase::exchange, Phase::elementwise};
  EXPECT_EQ(describe(one_bit), exchanged);
  EXPECT_FALSE(exchanged.exchanges_momentum(7));
  EXPECT_TRUE(exchanged.exchanges_momentum(8));
  one_bit = config::default_rule(OptimizerType::onebitlamb);
  one_bit.as<config::OneBitLambOptions>().freeze_step = 7;
  exchanged.type = "OneBitLamb";
  exchanged.states.insert(exchanged.states.begin() + 2, {.name = "exp_avg_sq_fresh", .fresh = true});
  exchanged.phases = {Phase::parameter_norms, Phase::elementwise};
  exchanged.frozen_phases = {Phase::compress, Phase::exchange, Phase::refresh, Phase::elementwise};
  EXPECT_EQ(describe(one_bit), exchanged);
  EXPECT_TRUE(measures(exchanged) && refreshes(exchanged));
  Description muon = elementwise("Muon", {{"momentum_buffer"}});
  muon.phases = {Phase::direction, Phase::whole_parameters, Phase::elementwise};
  EXPECT_EQ(describe(config::default_rule(OptimizerType::muon)), muon);
  EXPECT_TRUE(takes_matrices(muon));
}

template <class... R>
std::vector<int> states_of_those_that_serve(const Hyper& hyper, RuleList<R...>) {
  std::vector<int> out;
  ((R::serves(hyper) ? out.push_back(R::state_count) : void()), ...);
  return out;
}

template <class... R>
std::vector<bool> serve_any(const std::vector<Hyper>& all, RuleList<R...>) {
  return {std::any_of(all.begin(), all.end(), [](const Hyper& h) { return R::serves(h); })...};
}

TEST(UpdateRule, OneRuleServesEachOptimizer) {
  for (const Hyper& h : every_rule()) {
    const std::vector<int> states = states_of_those_that_serve(h, Rules{});
    ASSERT_EQ(states.size(), 1u) << config::name_of(h.type);
    const std::vector<State> kept = describe(h).states;  // that a pass takes, which come first
    const auto taken = std::find_if(kept.begin(), kept.end(), [](const State& s) {
      return s.over_replicas != OverReplicas::same || s.fresh;
    });
    EXPECT_EQ(taken - kept.begin(), states[0]);
    EXPECT_EQ(describe(h).states.empty(), !h.keeps_states());
    EXPECT_EQ(describe(h).type, config::name_of(h.type));
  }
  for (const bool tested : serve_any(every_rule(), Rules{})) EXPECT_TRUE(tested) << "see every_rule()";
}

TEST(UpdateRule, RefusesIncompleteSpans) {
  Arena arena(1);
  Span span(8, DType::f32, DType::bf16);
  const auto refused = [&](const std::string& part, auto change, std::int64_t step = 1) {
    SpanUpdate u = span.all();
    change(u);
    testing::expect_error(ErrorKind::usage, part, [&] { update(u, Hyper(), step, arena); });
  };
  refused("no exp_avg_sq", [](SpanUpdate& u) { u.moments[1] = nullptr; });
  refused("no gradient", [](SpanUpdate& u) { u.grad = nullptr; });
  refused("no master", [](SpanUpdate& u) { u.master = nullptr; });
  refused("a bf16 parameter", [](SpanUpdate& u) { u.param = nullptr; });
  refused("must be fp32, bf16 or fp16, not int32", [](SpanUpdate& u) { u.grad_dtype = DType::i32; });
  refused(
      "count from 1", [](SpanUpdate&) {}, 0);
  EXPECT_TRUE(update(SpanUpdate{}, Hyper(), 1, arena));  // nothing to do
}

TEST(AverageScale, IsAPowerOfTwoAndARest) {
  for (int n = 1; n <= 100; ++n) {
    const AverageScale scale = AverageScale::over(n);
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale.seed, &exponent), 0.5)
        << "a power of two leaves the bits of gradients as they are";
    EXPECT_LE(1, n * scale.seed) << "sums are no smaller than averages";
    EXPECT_LT(n * scale.seed, 2) << "nor twice as large";
    EXPECT_DOUBLE_EQ(n * scale.seed * scale.rest(n), 1) << n;
  }
  EXPECT_THROW(AverageScale::over(0), Error);
}

TEST(Clipping, OneFactorUnscalesAndClips) {
  EXPECT_EQ(gradient_factor(0.5, 1, 1), 1);
  EXPECT_EQ(gradient_factor(0.5, 1024, 1), 1.0 / 1024);
  EXPECT_DOUBLE_EQ(gradient_factor(4, 1, 1), 1 / (4 + 1e-6));
  EXPECT_DOUBLE_EQ(gradient_factor(4, 256, 2), 2 / (4 + 1e-6) / 256);
  EXPECT_EQ(gradient_factor(1e9, 8, 0), 1.0 / 8);
  EXPECT_EQ(gradient_factor(1e9, 8, -1), 1.0 / 8);
  EXPECT_EQ(clip_factor(0, 1), 1);
  testing::expect_error(ErrorKind::usage, "norm inf",
                        [] { gradient_factor(std::numeric_limits<double>::infinity(), 1, 1); });
}

}  // namespace
}  // namespace sherd::optim

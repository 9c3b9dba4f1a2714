// A layer of experts against a dense computation in double: every expert computes every token, and a matrix
// of ones and zeros says whose result counts (GShard's formulation).
#include <gmock/gmock.h>

#include <cmath>
#include <numeric>

#include "sharding/parallel/experts/moe.h"
#include "support/expect_error.h"
#include "support/plain_parameters.h"

namespace sherd::parallel {
namespace {

using tensor::Tensor;
using ::testing::ElementsAre;

using Matrix = std::vector<std::vector<double>>;

/// x·wᵀ + b of rows.
Matrix product(const Matrix& x, const std::vector<double>& w, const std::vector<double>& b) {
  Matrix out;
  for (const std::vector<double>& row : x) {
    std::vector<double>& to = out.emplace_back();
    for (std::size_t o = 0; o < w.size() / row.size(); ++o) {
      double sum = b.empty() ? 0 : b[o];
      for (std::size_t i = 0; i < row.size(); ++i) sum += row[i] * w[o * row.size() + i];
      to.push_back(sum);
    }
  }
  return out;
}

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

class MoeTest : public ::testing::Test {
 protected:
  static MoeOptions options() {
    MoeOptions o;
    o.hidden = 12, o.ffn_hidden = 20, o.experts = 6;
    o.routing = {.top_k = 2, .normalize = true};
    o.init = o.output_init = nn::Init::normal(0, 0.5);
    return o;
  }
  std::vector<double> weight(const test::PlainParameters& all, const std::string& name) {
    return cpu_.values(all.find(name)->value);
  }
  Matrix expert(const test::PlainParameters& all, const MoeOptions& o, std::int64_t e, const Matrix& x) {
    const std::string at = cat("experts.", e, ".");
    const auto bias = [&](const char* part) {
      return o.bias ? weight(all, at + part + ".bias") : std::vector<double>();
    };
    Matrix wide = product(x, weight(all, at + "up.weight"), bias("up"));
    for (std::vector<double>& row : wide) {
      if (!o.gated) {
        for (double& v : row) v = gelu(v);
        continue;
      }
      const std::size_t f = row.size() / 2;
      for (std::size_t i = 0; i < f; ++i) row[i] = row[i] / (1 + std::exp(-row[i])) * row[f + i];
      row.resize(f);
    }
    return product(wide, weight(all, at + "down.weight"), bias("down"));
  }
  /// Weight of each expert's result for each token: [tokens][experts].
  Matrix combination(const test::PlainParameters& all, const MoeOptions& o, const Matrix& x) {
    Matrix out;
    for (const std::vector<double>& z : product(x, weight(all, "router.weight"), {})) {
      std::vector<std::size_t> order(z.size());
      std::iota(order.begin(), order.end(), 0u);
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return z[a] > z[b]; });
      std::vector<double> score(z.size());
      double all_of_them = 0, taken = 0;
      for (std::size_t i = 0; i < z.size(); ++i) all_of_them += std::exp(z[i]);
      for (std::size_t i = 0; i < z.size(); ++i) score[i] = std::exp(z[i]) / all_of_them;
      const auto k = static_cast<std::size_t>(o.routing.top_k);
      for (std::size_t j = 0; j < k; ++j) taken += score[order[j]];
      std::vector<double>& weights = out.emplace_back(z.size());
      for (std::size_t j = 0; j < k; ++j)
        weights[order[j]] = score[order[j]] / (o.routing.normalize ? taken : 1);
    }
    return out;
  }

  test::Cpu cpu_;
};

TEST_F(MoeTest, IsTheSumOfAllExpertsByADenseMatrix) {
  for (const bool gated : {false, true})
    for (const int k : {1, 2, 6})
      for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-12}, {DType::f32, 2e-5}}) {
        MoeOptions o = options();
        o.gated = gated, o.bias = !gated, o.routing = {.top_k = k, .normalize = k == 2};
        Moe layer(o);
        test::PlainParameters all(*cpu_.kernels, layer, dtype);
        autograd::Tape tape(*cpu_.kernels);
        const Tensor input = cpu_.normal({3, 5, 12}, 9, dtype);
        const std::vector<double> flat = cpu_.values(input);
        Matrix x;
        for (std::size_t t = 0; t < 15; ++t)
          x.emplace_back(flat.begin() + static_cast<std::ptrdiff_t>(t) * 12,
                         flat.begin() + static_cast<std::ptrdiff_t>(t + 1) * 12);
        const Matrix weights = combination(all, o, x);
        std::vector<double> want(flat.size());
        for (std::int64_t e = 0; e < o.experts; ++e) {
          const Matrix made = expert(all, o, e, x);
          for (std::size_t t = 0; t < x.size(); ++t)
            for (std::size_t i = 0; i < 12; ++i)
              want[t * 12 + i] += weights[t][static_cast<std::size_t>(e)] * made[t][i];
        }
        const std::vector<double> got = cpu_.values(layer(tape, tape.input(input)).value());
        for (std::size_t i = 0; i < want.size(); ++i)
          ASSERT_NEAR(got[i], want[i], tolerance * 10) << gated << k << name_of(dtype) << ' ' << i;
        const RoutingTotals totals = layer.take_totals();
        EXPECT_EQ(totals.choices, 15 * k);
        EXPECT_EQ(std::accumulate(totals.per_expert.begin(), totals.per_expert.end(), std::int64_t{0}),
                  15 * k);
        EXPECT_EQ(totals.dropped, 0);
        EXPECT_EQ(layer.take_totals().choices, 0);
      }
}

TEST(Dispatch, SortsChoicesByExpertAndKeepsTheOrderOfTokens) {
  const std::vector<std::int32_t> chosen{2, 0, 0, 2, 2, 1};
  const Dispatch plan = plan_dispatch(chosen, 4, 2);
  EXPECT_THAT(plan.counts, ElementsAre(2, 1, 3, 0));
  EXPECT_THAT(plan.sources, ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(plan.places, ElementsAre(3, 0, 1, 4, 5, 2));
}

/// A dry run counts rows, and has no lists of them.
TEST(Dispatch, IsOfCountsAloneWhereNothingIsChosen) {
  EXPECT_THAT(dry_dispatch({4, 1, 3}, -1).counts, ElementsAre(4, 1, 3));
  const Dispatch few = dry_dispatch({4, 1, 3}, 2);
  EXPECT_THAT(few.counts, ElementsAre(2, 1, 2));
  EXPECT_EQ(few.rows(), 5);
  EXPECT_TRUE(few.sources.empty() && few.places.empty());
  const auto device = device::make_meta_device(1);
  const auto kernels = tensor::make_kernels(*device);
  autograd::Tape tape(*kernels);
  const autograd::Var logits = tape.input(Tensor::empty(*device, {5, 3}, DType::f32));
  const autograd::Routed all = autograd::route(logits, {}, {.top_k = 2});
  EXPECT_THAT(all.per_expert, ElementsAre(4, 3, 3)) << "tokens take all experts in turn";
  EXPECT_TRUE(all.chosen.empty());
  EXPECT_THAT(
      autograd::route(logits, {}, {.top_k = 2}, nullptr, {false, true, false, false, true}).per_expert,
      ElementsAre(2, 2, 2));
}

TEST(Dispatch, DropsTheLowestWeightsOrWhatComesLate) {
  // Tokens 0, 1 and 2 want expert 0; the first of them as a second choice.
  const std::vector<std::int32_t> chosen{1, 0, 0, 1, 0, 1};
  const std::vector<double> weights{0.6, 0.4, 0.3, 0.7, 0.9, 0.1};
  const auto plan = [&](std::int64_t capacity, Drop drop) {
    return plan_dispatch(chosen, 2, 2, dropped_choices(chosen, 2, 2, capacity, drop, weights));
  };
  EXPECT_THAT(plan(2, Drop::by_weight).places, ElementsAre(2, 0, -1, 3, 1, -1));
  EXPECT_THAT(plan(2, Drop::by_weight).sources, ElementsAre(0, 2, 0, 1));
  EXPECT_THAT(plan(2, Drop::by_position).places, ElementsAre(2, -1, 0, 3, 1, -1));
  EXPECT_THAT(plan(0, Drop::by_position).sources, ElementsAre());
  EXPECT_THAT(dropped_choices(chosen, 2, 2, -1, Drop::by_weight, weights), ElementsAre());
}

TEST(Dispatch, PutsTheRowsOfEachExpertTogetherInRankOrder) {
  // Rank 0 sends rows 0 to expert 0 and 1, 2 to expert 1; rank 1 rows 3, 4 and none; rank 2 none and row 5.
  const Arrivals plan = plan_arrivals({{1, 2}, {2, 0}, {0, 1}});
  EXPECT_THAT(plan.order, ElementsAre(0, 3, 4, 1, 2, 5));
  EXPECT_THAT(plan.inverse, ElementsAre(0, 3, 4, 1, 2, 5));
  EXPECT_THAT(plan_arrivals({{1, 2}, {1, 1}}).order, ElementsAre(0, 3, 1, 2, 4));
  EXPECT_THAT(plan_arrivals({{1, 2}, {1, 1}}).inverse, ElementsAre(0, 2, 3, 1, 4));
}

TEST(Dispatch, CapacityIsAShareRoundedUp) {
  MoeOptions o;
  o.experts = 8, o.routing.top_k = 2;
  EXPECT_EQ(expert_capacity(o, 100), -1);
  o.capacity_factor = 1;
  EXPECT_EQ(expert_capacity(o, 100), 25);
  o.capacity_factor = 1.25;
  EXPECT_EQ(expert_capacity(o, 101), 32);
}

TEST_F(MoeTest, WhatIsDroppedCountsAndGivesNothing) {
  MoeOptions o = options();
  o.routing = {.top_k = 1}, o.capacity_factor = 0.5, o.drop = Drop::by_position;
  Moe layer(o);
  test::PlainParameters all(*cpu_.kernels, layer, DType::f64);
  autograd::Tape tape(*cpu_.kernels);
  const std::vector<double> got = cpu_.values(layer(tape, tape.input(cpu_.normal({24, 12}, 9))).value());
  const RoutingTotals totals = layer.take_totals();
  std::int64_t taken = 0, zeros = 0;
  for (const std::int64_t n : totals.per_expert) taken += std::min<std::int64_t>(n, 2);  // ⌈24/6·0.5⌉
  for (std::size_t t = 0; t < 24; ++t)
    zeros += std::all_of(&got[t * 12], &got[t * 12] + 12, [](double v) { return v == 0; });
  EXPECT_EQ(totals.dropped, 24 - taken);
  EXPECT_EQ(zeros, totals.dropped);
  EXPECT_GT(zeros, 0);
}

/// The losses go to the router in backward: an even load has a balance of 1.
TEST_F(MoeTest, LossesReachTheRouterTimesTheSeed) {
  MoeOptions o = options();
  const auto gradient = [&](const RouterLosses& losses, double seed, double factor) {
    o.losses = losses;
    Moe layer(o);
    test::PlainParameters all(*cpu_.kernels, layer, DType::f64);
    autograd::Tape tape(*cpu_.kernels);
    const Var out = layer(tape, tape.input(cpu_.normal({40, 12}, 9)));
    tape.loss_seed = seed;
    const Tensor dy = tape.empty(out.shape(), DType::f64);
    cpu_.kernels->fill(dy, factor);
    tape.backward({{out, dy}});
    return cpu_.values(all.find("router.weight")->grad);
  };
  const std::vector<double> without = gradient({}, 1, 1), with = gradient({0.5, 0.1}, 1, 1),
                            balance = gradient({0.5, 0}, 1, 0), z = gradient({0, 0.1}, 1, 0),
                            scaled = gradient({0.5, 0.1}, 8, 8);
  double added = 0;
  for (std::size_t i = 0; i < with.size(); ++i) {
    ASSERT_NEAR(with[i], without[i] + balance[i] + z[i], 1e-12);
    ASSERT_NEAR(scaled[i], 8 * with[i], 1e-11);
    added = std::max({added, std::abs(balance[i]), std::abs(z[i])});
  }
  EXPECT_GT(added, 1e-3);
}

/// d(balance, z)/d(router) are differences of what totals say.
TEST_F(MoeTest, LossesAreThoseThatTotalsTell) {
  for (const RouterScores scores : {RouterScores::softmax, RouterScores::sigmoid}) {
    MoeOptions o = options();
    o.routing.scores = scores, o.losses = {0.7, 0.2};
    Moe layer(o);
    test::PlainParameters all(*cpu_.kernels, layer, DType::f64);
    autograd::Tape tape(*cpu_.kernels);
    const Tensor input = cpu_.normal({40, 12}, 9);
    const auto told = [&] {
      (void)layer.take_totals();
      (void)layer(tape, tape.input(input));
      const RoutingTotals totals = layer.take_totals();
      return 0.7 * totals.balance + 0.2 * totals.z;
    };
    const Var out = layer(tape, tape.input(input));
    const Tensor dy = tape.empty(out.shape(), DType::f64);
    cpu_.kernels->fill(dy, 0);
    tape.backward({{out, dy}});
    const nn::ParameterPtr router = all.find("router.weight");
    for (const std::int64_t i : {0, 17, 70}) {
      double& w = router->value.data<double>()[i];
      const double at = w, step = 1e-5;
      w = at + step;
      const double above = told();
      w = at - step;
      const double below = told();
      w = at;
      EXPECT_NEAR(router->grad.data<double>()[i], (above - below) / (2 * step), 1e-7) << i;
    }
  }
}

TEST_F(MoeTest, RefusesWhatDoesNotFit) {
  const auto refuse = [&](const char* text, const std::function<void(MoeOptions&)>& change) {
    MoeOptions o = options();
    change(o);
    sherd::testing::expect_error(ErrorKind::config, text, [&] { Moe layer(o); });
  };
  refuse("experts: a token cannot take 7 of 6", [](MoeOptions& o) { o.routing.top_k = 7; });
  refuse("experts: 6 cannot lie in 4 equal groups", [](MoeOptions& o) { o.routing.groups = 4; });
  refuse("the weight of a token's only expert would always be the same",
         [](MoeOptions& o) { o.routing = {.top_k = 1, .normalize = true}; });
  refuse("the weight of a token's only expert would always be the same",
         [](MoeOptions& o) { o.routing = {.top_k = 1, .scores = RouterScores::softmax_of_chosen}; });
}

}  // namespace
}  // namespace sherd::parallel

// Routers without their losses: biases, jitter, and numbers that are none.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd/ops.h"
#include "models/held_moe.h"
#include "support/plain_parameters.h"

namespace sherd::parallel {
namespace {

using tensor::Tensor;
using ::testing::ElementsAre;
using Values = std::vector<double>;

MoeOptions router_options(int top_k) {
  MoeOptions o;
  o.hidden = hidden, o.ffn_hidden = 20, o.experts = experts;
  o.routing = {.top_k = top_k, .normalize = top_k > 1};
  o.losses = {.balance = 0.7};
  o.init = o.output_init = nn::Init::normal(0, 0.5);
  return o;
}

TEST(RouterBias, MovesAgainstTheLoadAndCountsForTheChoiceAlone) {
  test::Cpu cpu;
  MoeOptions o = router_options(1);
  o.bias_update = 0.25;
  HeldMoe holder(o);
  test::PlainParameters all(*cpu.kernels, holder, DType::f64);
  Moe& layer = *holder.layer;
  // 24 choices of 6 experts, of which each would have 4.
  layer.end_step(Values{4, 0, 9, 5, 6, 0, 24, 3, 2, 2.5, 8}, true);
  EXPECT_THAT(layer.bias(), ElementsAre(0, 0.25, -0.25, -0.25, -0.25, 0.25));
  EXPECT_EQ(layer.last_step().imbalance(), 9.0 / 4);
  EXPECT_EQ(layer.last_step().dropped_share(), 3.0 / 24);
  layer.end_step(Values{0, 24, 0, 0, 0, 0, 24, 0, 1, 1, 1}, false);  // skipped
  EXPECT_THAT(layer.bias(), ElementsAre(0, 0.25, -0.25, -0.25, -0.25, 0.25));
  // A bias beyond all scores decides; weights are the scores'.
  layer.restore(std::vector<float>{0, 0, 0, 0, 5, 0});
  autograd::Tape tape(*cpu.kernels);
  const Tensor x = cpu.normal({10, hidden}, 9);
  const Values biased = cpu.values(layer(tape, tape.input(x)).value());
  EXPECT_THAT(layer.take_totals().per_expert, ElementsAre(0, 0, 0, 0, 10, 0));
  const Values w = cpu.values(all.find("moe.router.weight")->value), rows = cpu.values(x);
  layer.restore(std::vector<float>(experts));
  const Values own = cpu.values(layer(tape, tape.input(x)).value());
  int same = 0;
  for (std::size_t t = 0; t < 10; ++t) {
    Values logits;
    for (std::size_t e = 0; e < experts; ++e)
      logits.push_back(std::inner_product(&w[e * hidden], &w[e * hidden] + hidden, &rows[t * hidden], 0.0));
    const bool chosen = std::max_element(logits.begin(), logits.end()) - logits.begin() == 4;
    for (std::size_t i = 0; chosen && i < hidden; ++i) EXPECT_EQ(own[t * hidden + i], biased[t * hidden + i]);
    same += chosen;
  }
  EXPECT_GT(same, 0);
  EXPECT_LT(same, 10);
}

TEST(RouterJitter, MultipliesWhatTheRouterReadsInTraining) {
  test::Cpu cpu;
  autograd::Tape tape(*cpu.kernels);
  const Tensor x = cpu.normal({4, hidden}, 9);
  const Values plain = cpu.values(x);
  const RandomKey key{7, 8};
  const Var in = tape.variable(x), out = autograd::jitter(in, 0.1, key);
  tape.backward({{out, x}});
  const Values got = cpu.values(out.value()), gradient = cpu.values(in.grad());
  double lowest = 2, highest = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double factor = 0.9 + 0.2 * static_cast<double>(uniform_at(key, i));
    EXPECT_NEAR(got[i], plain[i] * factor, 1e-6 * std::abs(plain[i]));
    EXPECT_EQ(gradient[i], got[i]);
    lowest = std::min(lowest, factor), highest = std::max(highest, factor);
  }
  EXPECT_LT(lowest, 0.93);
  EXPECT_GT(highest, 1.07);
  tape.training = false;
  EXPECT_EQ(cpu.values(autograd::jitter(tape.input(x), 0.1, key).value()), plain);
}

TEST(Router, GivesNoNumbersBackForNone) {
  test::Cpu cpu;
  for (const Drop drop : {Drop::by_weight, Drop::by_position}) {
    MoeOptions o = router_options(2);
    o.capacity_factor = 0.5, o.drop = drop, o.bias_update = 0.1, o.losses.z = 0.1;
    HeldMoe holder(o);
    test::PlainParameters all(*cpu.kernels, holder, DType::f64);
    Tensor x = cpu.normal({40, hidden}, 9);
    for (std::int64_t i = 0; i < 20 * hidden; i += 3)
      x.data<double>()[i] = i % 2 == 0 ? std::nan("") : HUGE_VAL;
    autograd::Tape tape(*cpu.kernels);
    const Var out = (*holder.layer)(tape, tape.input(x));
    const Values got = cpu.values(out.value());
    EXPECT_TRUE(std::any_of(got.begin(), got.end(), [](double v) { return std::isnan(v); }));
    tape.backward({{out, x}});
    const RoutingTotals totals = holder.layer->take_totals();
    EXPECT_EQ(std::accumulate(totals.per_expert.begin(), totals.per_expert.end(), std::int64_t{0}), 80);
    EXPECT_TRUE(std::isnan(totals.balance));
  }
}

}  // namespace
}  // namespace sherd::parallel

// Places of rows that hold no token: routers leave them out, as if the rows ended before.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "models/held_moe.h"
#include "support/expect_error.h"
#include "support/tiny_gpt.h"

namespace sherd::parallel {
namespace {

using tensor::Tensor;
using Values = std::vector<double>;

constexpr std::int64_t seq = 8;
constexpr std::int64_t lengths[] = {5, 7};  ///< tokens of two rows of `seq` places

struct Setting {
  BalanceLoss kind = BalanceLoss::all_choices;
  double capacity_factor = 0;
  Drop drop = Drop::by_weight;
  RouterScores scores = RouterScores::softmax;
};

MoeOptions filling_options(const Setting& setting) {
  MoeOptions o;
  o.hidden = hidden, o.ffn_hidden = 20, o.experts = experts;
  o.routing = {.top_k = 2, .scores = setting.scores, .normalize = true};
  o.losses = {.balance = 0.7, .z = 0.3, .kind = setting.kind};
  o.capacity_factor = setting.capacity_factor, o.drop = setting.drop, o.bias_update = 0.25;
  o.init = o.output_init = nn::Init::normal(0, 0.5);
  if (setting.kind == BalanceLoss::pooled) o.pooled = std::make_shared<PooledChoices>();
  return o;
}

std::shared_ptr<const std::vector<bool>> filling() {
  auto out = std::make_shared<std::vector<bool>>();
  for (const std::int64_t length : lengths)
    for (std::int64_t i = 0; i < seq; ++i) out->push_back(i >= length);
  return out;
}

/// The rows of [2, seq, width] that hold tokens, as one sequence.
Values tokens_of(const Values& x, std::int64_t width) {
  Values out;
  const std::vector<bool> fills = *filling();
  for (std::size_t row = 0; row < fills.size(); ++row)
    if (!fills[row])
      out.insert(out.end(), x.begin() + static_cast<std::ptrdiff_t>(row) * width,
                 x.begin() + static_cast<std::ptrdiff_t>(row + 1) * width);
  return out;
}

struct FillingOutcome {
  Values output, dx, router;
  RoutingTotals totals;
  std::vector<float> bias;
};

/// A step on x, [batch, rows, hidden], whose output has gradients `dy`.
FillingOutcome step(test::Cpu& cpu, const Setting& setting, const Tensor& x, const Tensor& dy,
                    bool filled_up) {
  HeldMoe holder(filling_options(setting));
  test::PlainParameters parameters(*cpu.kernels, holder, DType::f64);
  autograd::Tape tape(*cpu.kernels);
  tape.random = {3, 4};
  if (filled_up) tape.filling = filling();
  const Var in = tape.variable(x);
  const Var out = (*holder.layer)(tape, in);
  const autograd::GradRef slot = in.grad_ref();
  tape.backward(std::vector<autograd::OutputGradient>{{out, dy}});
  FillingOutcome got{cpu.values(out.value()),
                     cpu.values(slot->grad),
                     cpu.values(parameters.find("moe.router.weight")->grad),
                     {},
                     {}};
  holder.layer->end_step(holder.layer->counted(), true);
  got.totals = holder.layer->last_step(), got.bias = holder.layer->bias();
  return got;
}

void expect_equal_to_rounding(const Values& got, const Values& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-11) << what << ' ' << i;
}

TEST(Filling, RoutersLeaveItOut) {
  test::Cpu cpu;
  const Tensor x = cpu.normal({2, seq, hidden}, 5), dy = cpu.normal({2, seq, hidden}, 6);
  const auto alone = [&](const Tensor& of) {
    return Tensor::of<double>(*cpu.device, {1, 12, hidden}, tokens_of(cpu.values(of), hidden));
  };
  using enum BalanceLoss;
  for (const Setting& setting :
       {Setting{}, Setting{first_choices}, Setting{pooled}, Setting{all_choices, 0.75, Drop::by_weight},
        Setting{all_choices, 0.75, Drop::by_position},
        Setting{all_choices, 0, Drop::by_weight, RouterScores::sigmoid}}) {
    const FillingOutcome want = step(cpu, setting, alone(x), alone(dy), false);
    const FillingOutcome got = step(cpu, setting, x, dy, true);
    expect_equal_to_rounding(tokens_of(got.output, hidden), want.output, "output");
    expect_equal_to_rounding(tokens_of(got.dx, hidden), want.dx, "dx");
    expect_equal_to_rounding(got.router, want.router, "router");
    const auto size = [](const Values& all) {
      return std::accumulate(all.begin(), all.end(), 0.0, [](double s, double v) { return s + std::abs(v); });
    };
    EXPECT_NEAR(size(got.output), size(want.output), 1e-9) << "nothing elsewhere";
    EXPECT_NEAR(size(got.dx), size(want.dx), 1e-9) << "nothing elsewhere";
    EXPECT_EQ(got.totals.per_expert, want.totals.per_expert);
    EXPECT_EQ(got.totals.choices, 24);
    EXPECT_EQ(got.totals.dropped, want.totals.dropped);
    EXPECT_EQ(got.totals.dropped > 0, setting.capacity_factor > 0);
    EXPECT_NEAR(got.totals.balance, want.totals.balance, 1e-12);
    EXPECT_NEAR(got.totals.z, want.totals.z, 1e-12);
    EXPECT_EQ(got.bias, want.bias);
  }
}

/// load_balancing_loss_func() of Hugging Face's modeling_mixtral.py with an attention mask, of one layer.
double hugging_face_masked_loss(const Values& x, const Values& w, const std::vector<bool>& mask,
                                std::size_t k) {
  Values tokens_per_expert(k * experts), router_prob_per_expert(experts);
  double count = 0;
  for (std::size_t t = 0; t < mask.size(); ++t) {
    Values gates;
    for (std::size_t e = 0; e < experts; ++e)
      gates.push_back(
          std::exp(std::inner_product(&x[t * hidden], &x[t * hidden] + hidden, &w[e * hidden], 0.0)));
    const double sum = std::accumulate(gates.begin(), gates.end(), 0.0), attention = mask[t] ? 1 : 0;
    std::vector<std::size_t> order(experts);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return gates[a] > gates[b]; });
    for (std::size_t j = 0; j < k; ++j) tokens_per_expert[j * experts + order[j]] += attention;
    for (std::size_t e = 0; e < experts; ++e) router_prob_per_expert[e] += attention * gates[e] / sum;
    count += attention;
  }
  double overall = 0;
  for (std::size_t i = 0; i < tokens_per_expert.size(); ++i)
    overall += tokens_per_expert[i] / count * router_prob_per_expert[i % experts] / count;
  return overall * experts;
}

TEST(Filling, BalanceLossesAreThoseOfAnAttentionMask) {
  test::Cpu cpu;
  const Tensor x = cpu.normal({2, seq, hidden}, 5), dy = cpu.normal({2, seq, hidden}, 6);
  HeldMoe holder(filling_options({BalanceLoss::pooled}));
  test::PlainParameters parameters(*cpu.kernels, holder, DType::f64);
  const Values w = cpu.values(parameters.find("moe.router.weight")->value);
  std::vector<bool> mask = *filling();
  mask.flip();
  const double want = hugging_face_masked_loss(cpu.values(x), w, mask, 2);
  EXPECT_NEAR(step(cpu, {BalanceLoss::pooled}, x, dy, true).totals.balance, want, 1e-12);
  mask.assign(mask.size(), true);
  EXPECT_GT(std::abs(hugging_face_masked_loss(cpu.values(x), w, mask, 2) - want), 1e-3) << "and of no other";
}

/// No number of a whole model depends on what stands in those places.
TEST(Filling, WhatItIsDoesNotMatter) {
  test::Cpu cpu;
  models::GptConfig o = test::with_experts(test::tiny_llama());
  test::set_losses(o.moe, {.balance = 0.5, .z = 0.1}), o.moe.capacity_factor = 0.75;
  std::map<std::string, Values> expected;
  for (const std::int32_t id : {1, 7}) {
    models::Gpt model(o);
    test::PlainParameters parameters(*cpu.kernels, model, DType::f64);
    autograd::Tape tape(*cpu.kernels);
    tensor::Batch batch = test::tiny_batch(cpu, o, 2, 7);
    for (const std::int64_t place : {5, 6, 13}) {
      batch["tokens"].data<std::int32_t>()[place] = id;
      batch["labels"].data<std::int32_t>()[place] = -100;
    }
    batch["filling"] = Tensor::of<std::int32_t>(*cpu.device, {2}, std::vector<std::int32_t>{2, 1});
    const autograd::Var loss = model(tape, batch);
    tape.backward(loss, 1);
    std::map<std::string, Values> got{{"loss", {tensor::scalar_value(loss.value())}}};
    for (const auto& p : parameters.all())
      if (p->grad_written) got[p->name] = cpu.values(p->grad);
    if (expected.empty()) expected = got;
    EXPECT_EQ(got, expected);
  }
}

TEST(Filling, OfOtherSequencesIsRefused) {
  test::Cpu cpu;
  const models::GptConfig o = test::tiny_llama();
  models::Gpt model(o);
  test::PlainParameters parameters(*cpu.kernels, model, DType::f64);
  tensor::Batch batch = test::tiny_batch(cpu, o, 2, 7);
  const auto run = [&](const std::vector<std::int32_t>& values) {
    batch["filling"] = Tensor::of<std::int32_t>(*cpu.device, {std::ssize(values)}, values);
    autograd::Tape tape(*cpu.kernels);
    (void)model(tape, batch);
  };
  using sherd::testing::expect_error;
  expect_error(ErrorKind::data, "'filling' tells of 3 sequences, of which there are 2", [&] {
    run({1, 0, 0});
  });
  expect_error(ErrorKind::data, "'filling' has 8 of 7 places", [&] { run({0, 8}); });
}

}  // namespace
}  // namespace sherd::parallel

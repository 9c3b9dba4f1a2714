// The losses that keep experts evenly loaded, against plain computations in double, written as others wrote
// them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>

#include "models/held_moe.h"
#include "support/expect_error.h"
#include "support/tiny_gpt.h"
#include "tests/sharding/parallel/ranks.h"

namespace sherd::parallel {
namespace {

using tensor::Tensor;
using Values = std::vector<double>;
using Matrix = std::vector<Values>;

MoeOptions losses_options(BalanceLoss kind, int top_k) {
  MoeOptions o;
  o.hidden = hidden, o.ffn_hidden = 20, o.experts = experts;
  o.routing = {.top_k = top_k, .normalize = top_k > 1};
  o.losses = {.balance = 0.7, .kind = kind};
  o.init = o.output_init = nn::Init::normal(0, 0.5);
  return o;
}

// ---- the losses, as others compute them ----

/// softmax(x·wᵀ), by token.
Matrix probabilities(const Values& x, const Values& w) {
  Matrix out;
  for (std::size_t t = 0; t < x.size() / hidden; ++t) {
    Values& p = out.emplace_back();
    for (std::size_t e = 0; e < experts; ++e)
      p.push_back(std::exp(std::inner_product(&x[t * hidden], &x[t * hidden] + hidden, &w[e * hidden], 0.0)));
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& v : p) v /= sum;
  }
  return out;
}

/// One-hot rows of the best expert, the second, …: [k][tokens][experts].
std::vector<Matrix> masks(const Matrix& p, int k) {
  std::vector<Matrix> out(static_cast<std::size_t>(k), Matrix(p.size(), Values(experts)));
  for (std::size_t t = 0; t < p.size(); ++t) {
    std::vector<std::size_t> order(experts);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return p[t][a] > p[t][b]; });
    for (std::size_t j = 0; j < out.size(); ++j) out[j][t][order[j]] = 1;
  }
  return out;
}

/// mean(m, dim=0)
Values column_means(const Matrix& m) {
  Values out(experts);
  for (const Values& row : m)
    for (std::size_t e = 0; e < experts; ++e) out[e] += row[e] / static_cast<double>(m.size());
  return out;
}

/// load_balancing_loss_func() of Hugging Face's modeling_mixtral.py, of the gates of all layers.
double hugging_face_loss(const std::vector<Matrix>& layers, int k) {
  Matrix routing_weights;
  for (const Matrix& layer : layers)
    routing_weights.insert(routing_weights.end(), layer.begin(), layer.end());
  const Values router_prob_per_expert = column_means(routing_weights);
  double overall_loss = 0;
  for (const Matrix& expert_mask : masks(routing_weights, k)) {
    const Values tokens_per_expert = column_means(expert_mask);
    overall_loss += std::inner_product(tokens_per_expert.begin(), tokens_per_expert.end(),
                                       router_prob_per_expert.begin(), 0.0);
  }
  return overall_loss * experts;
}

/// l_aux of DeepSpeed's top2gating(): mean(me·ce)·E², ce of mask1.
double deepspeed_top2(const Matrix& gates) {
  const Values me = column_means(gates), ce = column_means(masks(gates, 1)[0]);
  return std::inner_product(me.begin(), me.end(), ce.begin(), 0.0) / experts * experts * experts;
}

/// N·Σ f_i·P_i (Switch, equation 4), where f_i is the fraction of the choices that expert i has.
double switch_loss(const Matrix& gates, int k) {
  const Values P = column_means(gates);
  Values f(experts);
  for (const Matrix& mask : masks(gates, k)) {
    const Values share = column_means(mask);
    for (std::size_t e = 0; e < experts; ++e) f[e] += share[e] / k;
  }
  return experts * std::inner_product(f.begin(), f.end(), P.begin(), 0.0);
}

double plain_loss(BalanceLoss kind, const std::vector<Matrix>& layers, int k) {
  if (kind == BalanceLoss::pooled) return hugging_face_loss(layers, k);
  double sum = 0;
  for (const Matrix& gates : layers)
    sum += kind == BalanceLoss::first_choices ? deepspeed_top2(gates) : switch_loss(gates, k);
  return sum;
}

/// Two layers on inputs of their own, whose outputs nobody uses: what reaches the routers are the losses.
class TwoLayers {
 public:
  TwoLayers(test::Cpu& cpu, BalanceLoss kind, int top_k) : cpu_(cpu), kind_(kind), top_k_(top_k) {
    MoeOptions o = losses_options(kind, top_k);
    if (kind == BalanceLoss::pooled) o.pooled = std::make_shared<PooledChoices>();
    for (std::uint64_t i = 0; i < 2; ++i) {
      layers_.push_back(std::make_unique<HeldMoe>(o));
      held_.push_back(std::make_unique<test::PlainParameters>(*cpu.kernels, *layers_[i], DType::f64, i + 1));
      inputs_.push_back(cpu.normal({3, 8, hidden}, 9 + i));
    }
  }
  void run(double seed) {
    autograd::Tape tape(*cpu_.kernels);
    tape.random = {3, 4};
    std::vector<autograd::OutputGradient> outputs;
    for (std::size_t i = 0; i < 2; ++i) {
      const Var out = (*layers_[i]->layer)(tape, tape.input(inputs_[i]));
      const Tensor dy = tape.empty(out.shape(), DType::f64);
      cpu_.kernels->fill(dy, 0);
      outputs.push_back({out, dy});
    }
    tape.loss_seed = seed;
    tape.backward(outputs);
  }
  nn::ParameterPtr router(std::size_t i) const { return held_[i]->find("moe.router.weight"); }
  double plain() {
    std::vector<Matrix> gates;
    for (std::size_t i = 0; i < 2; ++i)
      gates.push_back(probabilities(cpu_.values(inputs_[i]), cpu_.values(router(i)->value)));
    return plain_loss(kind_, gates, top_k_);
  }
  Moe& layer(std::size_t i) { return *layers_[i]->layer; }

 private:
  test::Cpu& cpu_;
  BalanceLoss kind_;
  int top_k_;
  std::vector<std::unique_ptr<HeldMoe>> layers_;
  std::vector<std::unique_ptr<test::PlainParameters>> held_;
  std::vector<Tensor> inputs_;
};

TEST(RouterLosses, AreThoseOfOtherTrainers) {
  test::Cpu cpu;
  for (const BalanceLoss kind : {BalanceLoss::all_choices, BalanceLoss::first_choices, BalanceLoss::pooled})
    for (const int k : {1, 2, 3}) {
      SCOPED_TRACE(cat(static_cast<int>(kind), " of ", k));
      TwoLayers layers(cpu, kind, k);
      layers.run(4);
      const double told = layers.layer(0).take_totals().balance + layers.layer(1).take_totals().balance;
      EXPECT_NEAR(told, layers.plain() * (kind == BalanceLoss::pooled ? 2 : 1), 1e-12);
      double largest = 0;
      for (std::size_t i = 0; i < 2; ++i)
        for (const std::int64_t at : {0, 5, 17, 40, 71}) {
          double& w = layers.router(i)->value.data<double>()[at];
          const double value = w, step = 1e-6;
          w = value + step;
          const double above = layers.plain();
          w = value - step;
          const double below = layers.plain();
          w = value;
          const double found = layers.router(i)->grad.data<double>()[at];
          EXPECT_NEAR(found, 4 * 0.7 * (above - below) / (2 * step), 1e-7) << i << ' ' << at;
          largest = std::max(largest, std::abs(found));
        }
      EXPECT_GT(largest, 1e-2);
    }
}

TEST(RouterLosses, OfAllLayersNeedAllOfThem) {
  test::Cpu cpu;
  MoeOptions o = losses_options(BalanceLoss::pooled, 2);
  o.pooled = std::make_shared<PooledChoices>();
  HeldMoe first(o), second(o);
  test::PlainParameters all(*cpu.kernels, first, DType::f64);
  autograd::Tape tape(*cpu.kernels);
  const Var out = (*first.layer)(tape, tape.input(cpu.normal({8, hidden}, 9)));
  sherd::testing::expect_error(ErrorKind::usage, "needs what each has chosen, and 1 have run", [&] {
    tape.backward({{out, tape.empty(out.shape(), DType::f64)}});
  });
  EXPECT_EQ(o.pooled->size(), 1u);
  second.layer->drop_step();
  EXPECT_EQ(o.pooled->size(), 0u);
}

// ---- micro-batches that ranks share ----

struct LossesOutcome {
  Values out, dx;
  std::map<std::string, Values> gradients;
  double dropped = 0, balance = 0, z = 0, micro_batches = 0;
};

/// Rows of [batch, rows, hidden] by their positions in the whole.
Values part_of(const Values& whole, std::int64_t batch, std::int64_t rows, std::int64_t all,
               const tensor::Positions& at) {
  Values out;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto from = whole.begin() + (b * all + at.at(row)) * hidden;
      out.insert(out.end(), from, from + hidden);
    }
  return out;
}

void put_part(const Values& part, std::int64_t batch, std::int64_t rows, std::int64_t all,
              const tensor::Positions& at, Values& whole) {
  whole.resize(static_cast<std::size_t>(batch * all * hidden));
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t row = 0; row < rows; ++row)
      std::copy_n(part.begin() + (b * rows + row) * hidden, hidden,
                  whole.begin() + (b * all + at.at(row)) * hidden);
}

/// A micro-batch of 2 x 16 tokens over so many context ranks.
LossesOutcome run_over(int ranks, ContextMethod method, const MoeOptions& base) {
  LossesOutcome found;
  std::mutex mutex;
  on_ranks(ranks, [&](test::Cpu& cpu, comm::Communicator& group) {
    MoeOptions o = base;
    if (o.losses.kind == BalanceLoss::pooled) o.pooled = std::make_shared<PooledChoices>();
    Layout layout;
    layout.context = &group, layout.context_method = method;
    HeldMoe holder(o, layout);
    test::PlainParameters all(*cpu.kernels, holder, DType::f64);
    const std::int64_t rows = 16 / ranks;
    const tensor::Positions at = layout.inner_positions(rows);
    const auto part = [&](std::uint64_t seed) {
      return Tensor::of<double>(*cpu.device, {2, rows, hidden},
                                part_of(cpu.values(cpu.normal({2, 16, hidden}, seed)), 2, rows, 16, at));
    };
    autograd::Tape tape(*cpu.kernels);
    tape.random = {3, 4};
    const Var x = tape.variable(part(9));
    const Var out = (*holder.layer)(tape, x);
    tape.backward({{out, part(10)}});
    const RoutingTotals totals = holder.layer->take_totals();
    const std::lock_guard lock(mutex);
    put_part(cpu.values(out.value()), 2, rows, 16, at, found.out);
    put_part(cpu.values(x.grad()), 2, rows, 16, at, found.dx);
    for (const auto& p : all.all()) {
      Values& sum = found.gradients[p->name];
      sum.resize(static_cast<std::size_t>(p->numel()));
      if (!p->grad_written) continue;
      const Values mine = cpu.values(p->grad);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += mine[i];
    }
    found.dropped += static_cast<double>(totals.dropped), found.balance += totals.balance;
    found.z += totals.z, found.micro_batches += static_cast<double>(totals.micro_batches);
  });
  return found;
}

void expect_same(const Values& got, const Values& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-12) << what << ' ' << i;
}

TEST(RouterLosses, AndCapacitiesAreThoseOfTheWholeMicroBatch) {
  for (const BalanceLoss kind : {BalanceLoss::all_choices, BalanceLoss::first_choices, BalanceLoss::pooled})
    for (const Drop drop : {Drop::by_weight, Drop::by_position}) {
      MoeOptions o = losses_options(kind, 2);
      o.losses.z = 0.1, o.capacity_factor = 0.6, o.drop = drop, o.jitter = 0.3;
      const LossesOutcome want = run_over(1, ContextMethod::ring, o);
      EXPECT_GT(want.dropped, 10);
      for (const int ranks : {2, 4})
        for (const ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses}) {
          SCOPED_TRACE(cat(ranks, " ranks, method ", static_cast<int>(method)));
          const LossesOutcome got = run_over(ranks, method, o);
          expect_same(got.out, want.out, "out");
          expect_same(got.dx, want.dx, "dx");
          for (const auto& [name, gradient] : want.gradients)
            expect_same(got.gradients.at(name), gradient, name);
          EXPECT_EQ(got.dropped, want.dropped);
          EXPECT_EQ(got.micro_batches, 1);
          EXPECT_NEAR(got.balance, want.balance, 1e-12);
          EXPECT_NEAR(got.z, want.z, 1e-11);
        }
    }
}

// ---- models ----

std::vector<Values> gradients(test::Cpu& cpu, const test::PlainParameters& all) {
  std::vector<Values> out;
  for (const auto& p : all.all()) out.push_back(cpu.values(p->grad));
  return out;
}

models::GptConfig pooled_model() {
  models::GptConfig o = test::with_experts(test::tiny_llama());
  test::set_losses(o.moe, {.balance = 0.5, .kind = BalanceLoss::pooled});
  return o;
}

TEST(RouterLosses, OfAllLayersOutlastRecomputeAndOtherMicroBatches) {
  test::Cpu cpu;
  const models::GptConfig o = pooled_model();
  models::Gpt model(o);
  test::PlainParameters all(*cpu.kernels, model, DType::f64);
  const auto layers = layers_of_experts(model);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[1].first, "blocks.1.mlp");
  const auto run = [&](Recompute recompute, bool together) {
    all.zero_grad();
    std::vector<std::unique_ptr<autograd::Tape>> tapes;
    std::vector<Var> losses;
    for (std::uint64_t i = 0; i < 2; ++i) {
      tapes.push_back(std::make_unique<autograd::Tape>(*cpu.kernels));
      tapes[i]->random = {1, i}, tapes[i]->recompute = recompute;
      losses.push_back(model(*tapes[i], test::tiny_batch(cpu, o, 3, 8, 5 * i + 1)));
      if (!together) tapes[i]->backward(losses[i]);
    }
    EXPECT_EQ(layers[0].second->options().pooled->size(), together ? 2u : 0u);
    for (std::size_t i = 0; together && i < 2; ++i) tapes[i]->backward(losses[i]);
    EXPECT_EQ(layers[0].second->options().pooled->size(), 0u);
    return gradients(cpu, all);
  };
  const auto want = run(Recompute::none, false);
  const RoutingTotals totals = layers[0].second->take_totals();
  EXPECT_EQ(totals.choices, 2 * 3 * 8 * 2);
  EXPECT_EQ(totals.micro_batches, 2);
  EXPECT_EQ(run(Recompute::none, true), want);
  (void)layers[0].second->take_totals();
  EXPECT_EQ(run(Recompute::full, true), want);
  const RoutingTotals again = layers[0].second->take_totals();
  EXPECT_EQ(again.per_expert, totals.per_expert);  // once
  EXPECT_EQ(again.balance, totals.balance);
  EXPECT_EQ(again.micro_batches, 2);
}

}  // namespace
}  // namespace sherd::parallel

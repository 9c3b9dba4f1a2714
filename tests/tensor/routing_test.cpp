// Routing of tokens to experts, on every machine, against plain loops in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "tensor/routing.h"

namespace sherd::test {
namespace {

using tensor::Routing;

struct Plain {
  std::vector<double> scores, weights;
  std::vector<std::int32_t> chosen;
};

std::vector<double> scores_of(const std::vector<double>& z, RouterScores kind) {
  std::vector<double> out;
  const double top = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (const double x : z) {
    out.push_back(kind == RouterScores::sigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x - top));
    sum += out.back();
  }
  for (double& x : out) x /= kind == RouterScores::sigmoid ? 1 : sum;
  return out;
}

/// Experts by what they are preferred by, -1 where their group is not looked at.
std::vector<std::size_t> order_of(std::vector<double> value, const Routing& how) {
  const std::size_t size = value.size() / static_cast<std::size_t>(how.groups);
  std::vector<std::pair<double, int>> groups;
  for (int g = 0; g < how.groups; ++g) {
    std::vector<double> mine(
        value.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(g) * size),
        value.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(g + 1) * size));
    std::sort(mine.rbegin(), mine.rend());
    const bool two = how.scores == RouterScores::sigmoid && size > 1;
    groups.emplace_back(-(mine[0] + (two ? mine[1] : 0)), g);
  }
  std::sort(groups.begin(), groups.end());
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i < value.size(); ++i)
    for (int g = 0; g < how.top_groups; ++g)
      if (static_cast<std::size_t>(groups[static_cast<std::size_t>(g)].second) == i / size) out.push_back(i);
  std::stable_sort(out.begin(), out.end(), [&](auto a, auto b) { return value[a] > value[b]; });
  return out;
}

Plain route_by_hand(const std::vector<double>& z, const std::vector<double>& bias, const Routing& how) {
  Plain out{scores_of(z, how.scores), {}, {}};
  std::vector<double> value = out.scores;
  for (std::size_t i = 0; i < bias.size(); ++i) value[i] += bias[i];
  const std::vector<std::size_t> order = order_of(value, how);
  std::vector<double> late;
  for (int j = 0; j < how.top_k; ++j) {
    const std::size_t expert = order[static_cast<std::size_t>(j)];
    out.chosen.push_back(static_cast<std::int32_t>(expert));
    out.weights.push_back(out.scores[expert]);
    late.push_back(z[expert]);
  }
  if (how.scores == RouterScores::softmax_of_chosen) out.weights = scores_of(late, RouterScores::softmax);
  const double sum = std::accumulate(out.weights.begin(), out.weights.end(), 0.0);
  for (double& w : out.weights) w *= how.scale / (how.normalize ? sum : 1);
  return out;
}

struct RoutingCase {
  std::int64_t tokens;
  int experts;
  Routing how;
  bool biased = false;
};
const RoutingCase routing_cases[] = {
    {1, 1, {.top_k = 1}},
    {37, 8, {.top_k = 1}},
    {700, 8, {.top_k = 2, .normalize = true}},
    {33, 5, {.top_k = 5, .scores = RouterScores::softmax_of_chosen}},
    {129, 12, {.top_k = 3, .scores = RouterScores::softmax_of_chosen, .scale = 1.5}, true},
    {65,
     16,
     {.top_k = 4,
      .scores = RouterScores::sigmoid,
      .normalize = true,
      .scale = 2.5,
      .groups = 4,
      .top_groups = 2},
     true},
    {65, 6, {.top_k = 2, .scores = RouterScores::sigmoid}},
    {40, 9, {.top_k = 3, .scores = RouterScores::softmax, .scale = 3, .groups = 3, .top_groups = 2}},
    {300, 130, {.top_k = 8, .normalize = true}},
    {70, 1, {.top_k = 1, .scores = RouterScores::sigmoid}},  // as gates are
    {70, 2, {.top_k = 2, .scores = RouterScores::softmax}},
};

std::vector<double> row(const std::vector<double>& all, std::int64_t i, std::int64_t width) {
  return {all.begin() + i * width, all.begin() + (i + 1) * width};
}

/// Expert i is biased for by an odd amount that no score equals.
std::vector<double> bias_of(const RoutingCase& c) {
  std::vector<double> out;
  for (int i = 0; c.biased && i < c.experts; ++i) out.push_back(0.037 * ((i * 7) % 5));
  return out;
}

TEST(Routing, ChoosesAndWeighsAsAPlainLoop) {
  for (const RoutingCase& c : routing_cases)
    for (const DType dtype : {DType::f32, DType::f64}) {
      SCOPED_TRACE(cat(c.experts, " experts, ", name_of(dtype)));
      const std::vector<double> z = normals_in(dtype, c.tokens * c.experts, 3, 1.5), bias = bias_of(c);
      on_every_machine(
          [&](Machine& m) {
            const Tensor scores = m.empty({c.tokens, c.experts}, dtype),
                         weights = m.empty({c.tokens, c.how.top_k}, dtype),
                         chosen = m.empty({c.tokens, c.how.top_k}, DType::i32);
            m.kernels.route(m.of({c.tokens, c.experts}, dtype, z),
                            c.biased ? m.of({c.experts}, dtype, bias) : Tensor(), c.how, scores, chosen,
                            weights);
            return std::vector<Tensor>{scores, chosen, weights};
          },
          [&](const std::vector<Tensor>& got) {
            std::vector<double> scores, weights;
            std::vector<std::int32_t> chosen;
            for (std::int64_t t = 0; t < c.tokens; ++t) {
              const Plain plain = route_by_hand(row(z, t, c.experts), bias, c.how);
              scores.insert(scores.end(), plain.scores.begin(), plain.scores.end());
              weights.insert(weights.end(), plain.weights.begin(), plain.weights.end());
              chosen.insert(chosen.end(), plain.chosen.begin(), plain.chosen.end());
            }
            EXPECT_TRUE(std::equal(chosen.begin(), chosen.end(), got[1].data<std::int32_t>()));
            expect_close(values_of(got[0]), scores, dtype, 40, 0, "scores");
            expect_close(values_of(got[2]), weights, dtype, 60, 0, "weights");
          });
    }
}

TEST(Routing, EqualOnesAreTakenInOrderAndNaNsLast) {
  on_every_machine(
      [&](Machine& m) {
        const Tensor scores = m.empty({2, 4}, DType::f32), weights = m.empty({2, 3}, DType::f32),
                     chosen = m.empty({2, 3}, DType::i32);
        m.kernels.route(m.of({2, 4}, DType::f32, {1, 2, 2, 1, std::nan(""), 5, -1, 5}), {}, {.top_k = 3},
                        scores, chosen, weights);
        return std::vector<Tensor>{chosen};
      },
      [&](const std::vector<Tensor>& got) {
        const std::vector<std::int32_t> want{1, 2, 0, 1, 3, 2};
        EXPECT_TRUE(std::equal(want.begin(), want.end(), got[0].data<std::int32_t>()));
      });
}

/// Σ dw·weights + Σ balance·P + z·Σ lse², of one token, whose choice stays.
double objective(const std::vector<double>& z, const RoutingCase& c, const std::vector<std::int32_t>& chosen,
                 const std::vector<double>& dweights, const std::vector<double>& balance, double factor) {
  const std::vector<double> scores = scores_of(z, c.how.scores);
  std::vector<double> taken;
  for (const std::int32_t e : chosen)
    taken.push_back(c.how.scores == RouterScores::softmax_of_chosen ? z[static_cast<std::size_t>(e)]
                                                                    : scores[static_cast<std::size_t>(e)]);
  if (c.how.scores == RouterScores::softmax_of_chosen) taken = scores_of(taken, RouterScores::softmax);
  const double sum = c.how.normalize ? std::accumulate(taken.begin(), taken.end(), 0.0) : 1;
  const double whole = std::accumulate(scores.begin(), scores.end(), 0.0);
  double out = 0, exponentials = 0;
  for (std::size_t j = 0; j < taken.size(); ++j) out += dweights[j] * c.how.scale * taken[j] / sum;
  for (std::size_t i = 0; i < z.size(); ++i)
    out += balance[i] * scores[i] / whole, exponentials += std::exp(z[i]);
  return out + factor * std::log(exponentials) * std::log(exponentials);
}

TEST(Routing, GradientsAreThoseOfDifferences) {
  for (const RoutingCase& c : routing_cases) {
    SCOPED_TRACE(cat(c.experts, " experts"));
    constexpr double factor = 0.3, step = 1e-5;
    const std::vector<double> z = normals(c.tokens * c.experts, 3, 1.5), bias = bias_of(c),
                              dweights = normals(c.tokens * c.how.top_k, 4), balance = normals(c.experts, 5);
    std::vector<double> want;
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      std::vector<double> mine = row(z, t, c.experts);
      const std::vector<std::int32_t> chosen = route_by_hand(mine, bias, c.how).chosen;
      for (double& x : mine) {
        const double at = x;
        double slope = 0;
        for (const double way : {1.0, -1.0}) {
          x = at + way * step;
          slope +=
              way * objective(mine, c, chosen, row(dweights, t, c.how.top_k), balance, factor) / (2 * step);
        }
        x = at;
        want.push_back(slope);
      }
    }
    on_every_machine(
        [&](Machine& m) {
          const Shape shape{c.tokens, c.experts}, choice{c.tokens, c.how.top_k};
          const Tensor logits = m.of(shape, DType::f64, z), scores = m.empty(shape, DType::f64),
                       weights = m.empty(choice, DType::f64), chosen = m.empty(choice, DType::i32),
                       dlogits = m.empty(shape, DType::f64);
          m.kernels.route(logits, c.biased ? m.of({c.experts}, DType::f64, bias) : Tensor(), c.how, scores,
                          chosen, weights);
          m.kernels.route_backward(logits, c.how, scores, chosen, m.of(choice, DType::f64, dweights),
                                   {m.of({c.experts}, DType::f64, balance), factor}, dlogits);
          return std::vector<Tensor>{dlogits};
        },
        [&](const std::vector<Tensor>& got) {
          const std::vector<double> values = values_of(got[0]);
          for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(values[i], want[i], 2e-8) << i;
        });
  }
}

/// Tokens' choices at places in no order, some dropped.
std::vector<std::int32_t> places_of(std::int64_t tokens, std::int64_t k, std::int64_t rows) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(tokens * k), -1);
  for (std::int64_t r = 0; r < rows; ++r)
    out[static_cast<std::size_t>((r * 7919 + 3) % (tokens * k))] = static_cast<std::int32_t>(r);
  return out;
}

TEST(Routing, CombinesRowsByWeightAndTakesGradientsBack) {
  struct Case {
    std::int64_t tokens, k, rows, width;
  };
  for (const Case& c : {Case{5, 2, 10, 3}, {31, 3, 80, 1500}, {700, 2, 1200, 64}})
    for (const DType dtype : floating_dtypes) {
      SCOPED_TRACE(cat(c.width, " wide, ", name_of(dtype)));
      const DType compute = dtype == DType::f64 ? dtype : DType::f32;
      const std::vector<double> rows = normals_in(dtype, c.rows * c.width, 1),
                                weights = normals_in(compute, c.tokens * c.k, 2),
                                dout = normals_in(dtype, c.tokens * c.width, 3);
      const std::vector<std::int32_t> places = places_of(c.tokens, c.k, c.rows);
      std::vector<double> out(static_cast<std::size_t>(c.tokens * c.width)), drows(rows.size()),
          dweights(weights.size());
      for (std::size_t choice = 0; choice < places.size(); ++choice)
        for (std::int64_t i = 0; places[choice] >= 0 && i < c.width; ++i) {
          const auto from = static_cast<std::size_t>(places[choice] * c.width + i),
                     to = static_cast<std::size_t>(static_cast<std::int64_t>(choice) / c.k * c.width + i);
          out[to] += weights[choice] * rows[from];
          drows[from] = weights[choice] * dout[to];
          dweights[choice] += dout[to] * rows[from];
        }
      on_every_machine(
          [&](Machine& m) {
            const Tensor x = m.of({c.rows, c.width}, dtype, rows), at = m.ids({c.tokens, c.k}, places),
                         w = m.of({c.tokens, c.k}, compute, weights),
                         dy = m.of({c.tokens, c.width}, dtype, dout),
                         made = m.empty({c.tokens, c.width}, dtype), dx = m.empty({c.rows, c.width}, dtype),
                         dw = m.empty({c.tokens, c.k}, compute);
            m.kernels.combine_rows(x, at, w, made);
            m.kernels.combine_rows_backward(x, at, w, dy, dx, dw);
            // Each gradient alone, as where a router, or what it reads, does not train.
            const Tensor dx_alone = m.empty(dx.shape(), dtype), dw_alone = m.empty(dw.shape(), compute);
            m.kernels.combine_rows_backward(x, at, w, dy, dx_alone, {});
            m.kernels.combine_rows_backward(x, at, w, dy, {}, dw_alone);
            return std::vector<Tensor>{made, dx, dw, dx_alone, dw_alone};
          },
          [&](const std::vector<Tensor>& got) {
            expect_close(values_of(got[0]), out, dtype, 4, 10, "combined");
            const double width = static_cast<double>(c.width);
            for (const std::size_t i : {1, 3}) {
              expect_close(values_of(got[i]), drows, dtype, 1, 0, "drows");
              expect_close(values_of(got[i + 1]), dweights, compute, 4, 10 * std::sqrt(width) + 4,
                           "dweights");
            }
          });
    }
}

TEST(Routing, RefusesWhatDoesNotFit) {
  Machine m(cpu_isa(), 1);
  const auto route = [&](const Shape& logits, const Routing& how) {
    const Tensor z = m.empty(logits, DType::f32);
    m.kernels.route(z, {}, how, m.empty(logits, DType::f32), m.empty({logits[0], how.top_k}, DType::i32),
                    m.empty({logits[0], how.top_k}, DType::f32));
  };
  testing::expect_error(ErrorKind::usage, "route: a token cannot take 5 of 4 experts", [&] {
    route({3, 4}, {.top_k = 5});
  });
  testing::expect_error(ErrorKind::usage, "route: 4 experts cannot lie in 3 groups", [&] {
    route({3, 4}, {.top_k = 1, .groups = 3});
  });
}

}  // namespace
}  // namespace sherd::test

// The gated delta rule, its gates and the short convolution before it, against their definitions row by row
// in double, and their gradients against central differences.
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "support/numeric_gradient.h"
#include "tensor/argument_checks.h"

namespace sherd::test {
namespace {

using tensor::Documents;
using Values = std::vector<double>;

struct DeltaCase {
  std::int64_t batch, rows;
  int key_heads, value_heads;
  std::int64_t key_dim, value_dim;
  std::shared_ptr<const Documents> documents{};

  std::int64_t width() const { return key_heads * 2 * key_dim + value_heads * value_dim; }
  tensor::DeltaRule rule() const {
    return {.key_heads = key_heads, .value_heads = value_heads, .key_dim = key_dim, .documents = documents};
  }
  Shape qkv() const { return {batch, rows, width()}; }
  Shape gates() const { return {batch, rows, 2 * value_heads}; }
  Shape out() const { return {batch, rows, value_heads * value_dim}; }
  Shape states() const { return {batch, value_heads, (rows + 63) / 64, key_dim, value_dim}; }
  bool begins(std::int64_t sequence, std::int64_t row) const {
    return row == 0 ||
           (documents && std::binary_search(documents->begin(), documents->end(), sequence * rows + row));
  }
};

/// beta in (0, 1), then g in (-2, 0); now and then a g that forgets everything.
Values some_gates(const DeltaCase& c, std::uint64_t seed) {
  Values out = normals(c.gates().numel(), seed);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool beta =
        i % static_cast<std::size_t>(2 * c.value_heads) < static_cast<std::size_t>(c.value_heads);
    out[i] = beta ? 1 / (1 + std::exp(-out[i])) : -0.3 * out[i] * out[i] - (i % 41 == 7 ? 60 : 0);
  }
  return out;
}

/// The rule as its paper has it.
Values by_definition(const DeltaCase& c, const Values& qkv, const Values& gates) {
  Values out(static_cast<std::size_t>(c.out().numel()));
  const auto dk = static_cast<std::size_t>(c.key_dim), dv = static_cast<std::size_t>(c.value_dim);
  const int repeats = c.value_heads / c.key_heads;
  const auto group = 2 * dk + static_cast<std::size_t>(repeats) * dv;
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (int h = 0; h < c.value_heads; ++h) {
      Values state(dk * dv);
      for (std::int64_t t = 0; t < c.rows; ++t) {
        const auto row = static_cast<std::size_t>(b * c.rows + t);
        const double* q = qkv.data() + row * static_cast<std::size_t>(c.width()) +
                          static_cast<std::size_t>(h / repeats) * group;
        const double *k = q + dk, *v = k + dk + static_cast<std::size_t>(h % repeats) * dv;
        const double
            beta = gates[row * static_cast<std::size_t>(2 * c.value_heads) + static_cast<std::size_t>(h)],
            g = gates[row * static_cast<std::size_t>(2 * c.value_heads) +
                      static_cast<std::size_t>(c.value_heads + h)];
        double qq = 1e-6, kk = 1e-6;
        for (std::size_t i = 0; i < dk; ++i) qq += q[i] * q[i], kk += k[i] * k[i];
        for (double& s : state) s *= c.begins(b, t) ? 0 : std::exp(g);
        for (std::size_t j = 0; j < dv; ++j) {
          double known = 0;
          for (std::size_t i = 0; i < dk; ++i) known += state[i * dv + j] * k[i] / std::sqrt(kk);
          const double change = beta * (v[j] - known);
          double found = 0;
          for (std::size_t i = 0; i < dk; ++i) {
            state[i * dv + j] += k[i] / std::sqrt(kk) * change;
            found += state[i * dv + j] * q[i] / std::sqrt(qq * static_cast<double>(dk));
          }
          out[(row * static_cast<std::size_t>(c.value_heads) + static_cast<std::size_t>(h)) * dv + j] = found;
        }
      }
    }
  return out;
}

std::shared_ptr<const Documents> documents(Documents ends) {
  return std::make_shared<const Documents>(std::move(ends));
}

const std::vector<DeltaCase>& delta_cases() {
  static const std::vector<DeltaCase> out{
      {1, 1, 1, 1, 1, 1},
      {2, 5, 1, 1, 4, 3},
      {1, 66, 1, 2, 4, 2},
      {1, 70, 1, 1, 4, 3, documents({0, 1, 10, 64, 67, 70})},
      {1, 70, 2, 4, 6, 5},
      {2, 64, 1, 2, 8, 8},
      {1, 130, 2, 2, 20, 12},
      {2, 75, 2, 4, 6, 5, documents({0, 1, 10, 10, 64, 70, 75, 75, 139, 150})},
      {1, 90, 1, 3, 32, 40, documents({0, 64, 90})}};
  return out;
}

class Delta : public ::testing::TestWithParam<DType> {
 protected:
  /// Relative to the largest element.
  static void expect_within(const Values& got, const Values& want, double bound, const char* what) {
    ASSERT_EQ(got.size(), want.size());
    double most = 0;
    for (const double x : want) most = std::max(most, std::abs(x));
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], want[i], bound * std::max(most, 1e-3)) << what << ", element " << i;
  }
  double bound() const {
    return GetParam() == DType::f64   ? 1e-11
           : GetParam() == DType::f32 ? 2e-5
           : GetParam() == DType::f16 ? 2e-3
                                      : 1.5e-2;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Delta, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(Delta, follows_its_definition) {
  const DType dtype = GetParam(), compute = tensor::compute_type(dtype);
  for (const DeltaCase& c : delta_cases()) {
    const Values qkv = normals_in(dtype, c.qkv().numel(), 1), gates = some_gates(c, 2);
    on_every_machine(
        [&](Machine& m) {
          const Tensor out = m.empty(c.out(), dtype), states = m.empty(c.states(), compute);
          const Tensor x = m.of(c.qkv(), dtype, qkv), of = m.of(c.gates(), compute, gates);
          m.kernels.delta_rule(x, of, c.rule(), {}, states, out);
          m.kernels.delta_rule(x, of, c.rule(), {}, {}, out);
          return std::vector<Tensor>{out};
        },
        [&](const std::vector<Tensor>& got) {
          expect_within(values_of(got[0]), by_definition(c, qkv, gates), bound(), "out");
        });
    if (HasFatalFailure()) return;
  }
}

/// The results of a text's rows are the same in one call and in many, beside other texts.
TEST_P(Delta, continues_texts) {
  const DType dtype = GetParam(), compute = tensor::compute_type(dtype);
  const DeltaCase c{1, 80, 2, 4, 6, 5};
  const Values qkv = normals_in(dtype, c.qkv().numel(), 3), gates = some_gates(c, 4);
  for (const std::vector<std::int64_t>& ends :
       {std::vector<std::int64_t>{80}, {1, 2, 3, 70, 71, 80}, {64, 65, 80}})
    on_every_machine(
        [&](Machine& m) {
          const Tensor states = m.of({3, 4, 6, 5}, compute, normals(3 * 4 * 6 * 5, 5));
          std::vector<Tensor> outs;
          std::int64_t begin = 0;
          for (const std::int64_t end : ends) {
            // Beside the text another of one row, and a row more that does not count.
            const std::int64_t n = end - begin;
            DeltaCase part = c;
            part.batch = 2, part.rows = n + 1;
            const auto cut = [&](const Values& of, std::int64_t width) {
              Values out(static_cast<std::size_t>(2 * (n + 1) * width), 0.5);
              std::copy_n(of.begin() + begin * width, n * width, out.begin() + (n + 1) * width);
              return out;
            };
            const Tensor out = m.empty(part.out(), dtype);
            const auto first = static_cast<std::int32_t>(begin), count = static_cast<std::int32_t>(n);
            m.kernels.delta_rule(m.of(part.qkv(), dtype, cut(qkv, c.width())),
                                 m.of(part.gates(), compute, cut(gates, 8)), part.rule(),
                                 {states, m.ids({2, 3}, {0, 0, 1, 2, first, count})}, {}, out);
            outs.push_back(out);
            begin = end;
          }
          return outs;
        },
        [&](const std::vector<Tensor>& got) {
          Values all;
          for (const Tensor& part : got) {
            const Values values = values_of(part);
            const std::size_t row = 20, rows = values.size() / row / 2;
            all.insert(all.end(), values.begin() + static_cast<std::ptrdiff_t>(rows * row),
                       values.end() - static_cast<std::ptrdiff_t>(row));
            for (std::size_t i = values.size() - row; i < values.size(); ++i) EXPECT_EQ(values[i], 0);
          }
          expect_within(all, by_definition(c, qkv, gates), bound(), "out");
        });
}

TEST_P(Delta, has_the_gradient_of_differences) {
  const DType dtype = GetParam(), compute = tensor::compute_type(dtype);
  for (const DeltaCase& c : delta_cases()) {
    if (c.qkv().numel() > 1000 && dtype == DType::f64) continue;
    const Values qkv = normals_in(dtype, c.qkv().numel(), 1), gates = some_gates(c, 2),
                 dout = normals_in(dtype, c.out().numel(), 3);
    Values want_qkv, want_gates;
    if (dtype == DType::f64) {
      Values x = qkv, of = gates;
      const auto f = [&] {
        const Values out = by_definition(c, x, of);
        double sum = 0;
        for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
        return sum;
      };
      want_qkv = numeric_gradient(x, f), want_gates = numeric_gradient(of, f);
    } else {  // those in double, which differences check
      Machine m(cpu_isa(), 1);
      const Tensor x = m.of(c.qkv(), DType::f64, qkv), of = m.of(c.gates(), DType::f64, gates),
                   out = m.of(c.out(), DType::f64, dout), states = m.empty(c.states(), DType::f64),
                   dx = m.empty(c.qkv(), DType::f64), dof = m.empty(c.gates(), DType::f64);
      m.kernels.delta_rule(x, of, c.rule(), {}, states, m.empty(c.out(), DType::f64));
      m.kernels.delta_rule_backward(x, of, c.rule(), states, out, dx, dof);
      want_qkv = values_of(dx), want_gates = values_of(dof);
    }
    on_every_machine(
        [&](Machine& m) {
          const Tensor x = m.of(c.qkv(), dtype, qkv), of = m.of(c.gates(), compute, gates),
                       states = m.empty(c.states(), compute), dx = m.empty(c.qkv(), dtype),
                       dof = m.empty(c.gates(), compute);
          m.kernels.delta_rule(x, of, c.rule(), {}, states, m.empty(c.out(), dtype));
          m.kernels.delta_rule_backward(x, of, c.rule(), states, m.of(c.out(), dtype, dout), dx, dof);
          return std::vector<Tensor>{dx, dof};
        },
        [&](const std::vector<Tensor>& got) {
          const double most = dtype == DType::f64 ? 1e-7 : bound();
          expect_within(values_of(got[0]), want_qkv, most, "dqkv");
          expect_within(values_of(got[1]), want_gates, dtype == DType::f64 ? 1e-7 : 1e-4, "dgates");
        });
    if (HasFatalFailure()) return;
  }
}

TEST_P(Delta, gates_and_their_gradients) {
  const DType dtype = GetParam(), compute = tensor::compute_type(dtype);
  constexpr std::int64_t rows = 37, heads = 6;
  constexpr int key_heads = 2, repeats = 3;
  Values x = normals_in(dtype, rows * 2 * heads, 1), a_log = normals_in(dtype, heads, 2),
         dt_bias = normals_in(dtype, heads, 3);
  x[3] = 30, x[4] = -40;  // steps whose exponential counts alone, or not at all
  const Values given = normals(rows * 2 * heads, 4);
  const auto f = [&](Values* gates) {
    double sum = 0;
    for (std::size_t t = 0; t < rows; ++t)
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t b = t * 2 * heads + h / repeats * 2 * repeats + h % repeats, a = b + repeats;
        const double beta = 1 / (1 + std::exp(-x[b])),
                     g = -std::exp(a_log[h]) * std::log1p(std::exp(x[a] + dt_bias[h]));
        if (gates) (*gates)[t * 2 * heads + h] = beta, (*gates)[t * 2 * heads + heads + h] = g;
        sum += given[t * 2 * heads + h] * beta + given[t * 2 * heads + heads + h] * g;
      }
    return sum;
  };
  Values want(static_cast<std::size_t>(rows * 2 * heads));
  f(&want);
  const auto sum = [&] { return f(nullptr); };
  const Values dx = numeric_gradient(x, sum), da_log = numeric_gradient(a_log, sum),
               ddt_bias = numeric_gradient(dt_bias, sum);
  on_every_machine(
      [&](Machine& m) {
        const Shape shape{rows, 2 * heads};
        const Tensor in = m.of(shape, dtype, x), logs = m.of({heads}, dtype, a_log),
                     biases = m.of({heads}, dtype, dt_bias), out = m.empty(shape, compute),
                     grad = m.empty(shape, dtype), parts = m.empty({2, rows, heads}, compute),
                     sums = m.empty({2 * heads}, compute);
        m.kernels.delta_gates(in, logs, biases, key_heads, out);
        m.kernels.delta_gates_backward(in, logs, biases, key_heads, m.of(shape, compute, given), grad, parts);
        m.kernels.sum_axis(parts, {.outer = 2, .extent = rows, .inner = heads}, 1, sums, false);
        return std::vector<Tensor>{out, grad, sums};
      },
      [&](const std::vector<Tensor>& got) {
        const double own = dtype == DType::f64 ? 1e-9 : 2e-6;
        expect_within(values_of(got[0]), want, own, "gates");
        expect_within(values_of(got[1]), dx, std::max(bound(), 1e-9), "dx");
        Values sums = da_log;
        sums.insert(sums.end(), ddt_bias.begin(), ddt_bias.end());
        expect_within(values_of(got[2]), sums, dtype == DType::f64 ? 1e-8 : 1e-5, "parts");
      });
}

TEST_P(Delta, short_convolutions_and_their_gradients) {
  const DType dtype = GetParam();
  for (const auto& [batch, rows, columns, taps, ends] :
       {std::tuple{std::int64_t{1}, std::int64_t{1}, std::int64_t{1}, std::int64_t{1},
                   std::shared_ptr<const Documents>()},
        {2, 9, 70, 4, nullptr},
        {1, 1040, 1, 3, documents({0, 1023, 1040})},  // more rows than a thread takes at a time
        {2, 7, 5, 3, documents({0, 1, 1, 5, 7, 14})}}) {
    Values x = normals_in(dtype, batch * rows * columns, 1), w = normals_in(dtype, columns * taps, 2);
    const Values given = normals_in(dtype, batch * rows * columns, 3);
    const DeltaCase at{batch, rows, 1, 1, 1, 1, ends};
    const auto f = [&, batch = batch, rows = rows, columns = columns, taps = taps](Values* out) {
      double all = 0;
      for (std::int64_t b = 0; b < batch; ++b)
        for (std::int64_t c = 0; c < columns; ++c)
          for (std::int64_t t = 0; t < rows; ++t) {
            double sum = 0;
            for (std::int64_t j = taps - 1, row = t; j >= 0 && row >= 0; --j, --row) {
              sum += w[static_cast<std::size_t>(c * taps + j)] *
                     x[static_cast<std::size_t>((b * rows + row) * columns + c)];
              if (at.begins(b, row)) break;
            }
            const auto i = static_cast<std::size_t>((b * rows + t) * columns + c);
            sum /= 1 + std::exp(-sum);
            if (out) (*out)[i] = sum;
            all += given[i] * sum;
          }
      return all;
    };
    Values want(x.size());
    f(&want);
    const auto sum = [&] { return f(nullptr); };
    const Values dx = numeric_gradient(x, sum), dw = numeric_gradient(w, sum);
    on_every_machine(
        [&, batch = batch, rows = rows, columns = columns, taps = taps, ends = ends](Machine& m) {
          const Shape shape{batch, rows, columns};
          const Tensor in = m.of(shape, dtype, x), weight = m.of({columns, taps}, dtype, w),
                       out = m.empty(shape, dtype), grad = m.empty(shape, dtype),
                       dweight = m.of({columns, taps}, dtype, Values(w.size(), 1.0)),
                       dout = m.of(shape, dtype, given);
          m.kernels.short_conv(in, weight, ends, {}, out);
          m.kernels.short_conv_backward(in, weight, ends, dout, grad, dweight, true);
          return std::vector<Tensor>{out, grad, dweight};
        },
        [&](const std::vector<Tensor>& got) {
          expect_within(values_of(got[0]), want, bound(), "out");
          expect_within(values_of(got[1]), dx, std::max(bound(), 1e-9), "dx");
          Values sums = dw;
          for (double& value : sums) value += 1;
          expect_within(values_of(got[2]), sums, std::max(bound(), 1e-9), "dweight");
        });
    if (HasFatalFailure()) return;
  }
}

TEST_P(Delta, convolutions_continue_texts) {
  const DType dtype = GetParam();
  constexpr std::int64_t rows = 12, columns = 6, taps = 4;
  const Values x = normals_in(dtype, rows * columns, 1), w = normals_in(dtype, columns * taps, 2);
  for (const std::vector<std::int64_t>& ends : {std::vector<std::int64_t>{12}, {1, 2, 3, 4, 12}, {2, 7, 12}})
    on_every_machine(
        [&](Machine& m) {
          const Tensor weight = m.of({columns, taps}, dtype, w), whole = m.empty({1, rows, columns}, dtype);
          m.kernels.short_conv(m.of({1, rows, columns}, dtype, x), weight, nullptr, {}, whole);
          const Tensor states = m.of({2, taps - 1, columns}, dtype, normals_in(dtype, 2 * 3 * columns, 5));
          std::vector<Tensor> out{whole};
          std::int64_t begin = 0;
          for (const std::int64_t end : ends) {
            const std::int64_t n = end - begin;
            Values part(static_cast<std::size_t>((n + 2) * columns), 0.5);  // two rows do not count
            std::copy_n(x.begin() + begin * columns, n * columns, part.begin());
            out.push_back(m.empty({1, n + 2, columns}, dtype));
            m.kernels.short_conv(
                m.of({1, n + 2, columns}, dtype, part), weight, nullptr,
                {states, m.ids({1, 3}, {1, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(n)})},
                out.back());
            begin = end;
          }
          return out;
        },
        [&](const std::vector<Tensor>& got) {
          Values all;
          for (std::size_t i = 1; i < got.size(); ++i) {
            const Values part = values_of(got[i]);
            all.insert(all.end(), part.begin(), part.end() - 2 * columns);
          }
          EXPECT_EQ(all, values_of(got[0]));
        });
}

TEST(DeltaRule, WhatDoesNotFitIsRefused) {
  using sherd::testing::expect_error;
  Machine m(cpu_isa(), 1);
  const DeltaCase c{1, 4, 2, 4, 6, 5};
  const Tensor qkv = m.empty(c.qkv(), DType::f32), gates = m.empty(c.gates(), DType::f32),
               out = m.empty(c.out(), DType::f32);
  const auto run = [&](const tensor::DeltaRule& rule, const tensor::StateStore& store = {}) {
    m.kernels.delta_rule(qkv, gates, rule, store, {}, out);
  };
  tensor::DeltaRule odd = c.rule();
  odd.key_dim = 11;
  expect_error(ErrorKind::usage, "a width of 44 does not hold 2 key heads of 11", [&] { run(odd); });
  odd = c.rule(), odd.value_heads = 3;
  expect_error(ErrorKind::usage, "3 value heads cannot share 2 key heads", [&] { run(odd); });
  odd = c.rule(), odd.documents = documents({0, 3});
  expect_error(ErrorKind::usage, "documents do not fill", [&] { run(odd); });
  expect_error(ErrorKind::usage, "stored states are", [&] {
    run(c.rule(), {m.empty({2, 4, 6, 6}, DType::f32), m.ids({1, 3}, {0, 0, 4})});
  });
  expect_error(ErrorKind::usage, "at most 8 taps", [&] {
    m.kernels.short_conv(qkv, m.empty({c.width(), 9}, DType::f32), nullptr, {}, qkv);
  });
}

}  // namespace
}  // namespace sherd::test

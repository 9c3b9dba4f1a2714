#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "support/gpu/kernel_machines.h"

// Attention by its definition, and one call of each direction by the kernels.

namespace sherd::test::attention {

using Count = std::int64_t;
using tensor::Attention;
using tensor::Documents;
using tensor::ScoreIndex;
using Values = std::vector<double>;

struct Case {
  Count batch, seq;
  int heads, kv_heads;
  Count dim;
  bool causal = true;
  float dropout = 0;
  float scale = 0;
  ScoreIndex scores{};
  Count window = 0;
  Documents documents{};
  float cap = 0;
  bool sinks = false;

  Count width() const { return (heads + 2 * kv_heads) * dim; }
  Attention geometry() const {
    return {.heads = heads,
            .kv_heads = kv_heads,
            .causal = causal,
            .window = window,
            .scale = scale,
            .cap = cap,
            .dropout = dropout,
            .key = {11, 12},
            .scores = scores,
            .documents = documents.empty() ? nullptr : std::make_shared<const Documents>(documents)};
  }
  /// Whether query i of sequence b sees key j.
  bool sees(Count b, Count i, Count j) const {
    const Count behind = scores.query + i - (scores.key + j);
    const auto document = [&](Count row) { return std::ranges::upper_bound(documents, b * seq + row); };
    return (!causal || behind >= 0) && (window == 0 || (behind < window && (causal || -behind < window))) &&
           (documents.empty() || document(i) == document(j));
  }
  /// The number by which dropout knows a score, and the stream.
  std::uint64_t number(Count b, Count h, Count i, Count j) const {
    const Count all_heads = scores.heads ? scores.heads : heads, all = scores.seq ? scores.seq : seq;
    if (!documents.empty()) b = 0;
    return static_cast<std::uint64_t>(((b * all_heads + scores.head + h) * all + scores.query + i) * all +
                                      scores.key + j);
  }
  RandomKey key(Count b) const {
    return documents.empty() ? RandomKey{11, 12} : RandomKey{11, 12}.at(static_cast<std::uint64_t>(b));
  }
  std::string str() const {
    return cat(batch, " x ", seq, ", heads ", heads, "/", kv_heads, " of ", dim,
               causal ? ", causal" : ", full", ", dropout ", dropout, ", scale ", scale, ", score ",
               number(0, 0, 0, 0), ", window ", window, ", ", documents.size(), " bounds, cap ", cap,
               sinks ? ", sinks" : "");
  }
};

struct Result {
  Values out, lse, dqkv, dsinks;
};

/// Attention by its definition, whole matrices in double. `sinks`: one for each head, or none.
inline Result reference(const Case& c, const Values& qkv, const Values& dout, const Values& sinks = {}) {
  const auto size = [](Count n) { return static_cast<std::size_t>(n); };
  Result r{Values(size(c.batch * c.seq * c.heads * c.dim)), Values(size(c.batch * c.heads * c.seq)),
           Values(qkv.size()), Values(sinks.size())};
  const double scale = c.scale != 0 ? double(c.scale) : 1 / std::sqrt(double(c.dim));
  const Count group = c.heads / c.kv_heads;
  for (Count b = 0; b < c.batch; ++b)
    for (Count h = 0; h < c.heads; ++h) {
      const Count g = h / group;
      const auto at = [&](Count i, Count col) { return size((b * c.seq + i) * c.width() + col); };
      const Count q = (g * (group + 2) + h % group) * c.dim, k = (g * (group + 2) + group) * c.dim,
                  v = k + c.dim;
      for (Count i = 0; i < c.seq; ++i) {
        Values p(size(c.seq)), kept(size(c.seq), 1.0), slope(size(c.seq), 1.0);
        double total = sinks.empty() ? 0 : std::exp(sinks[size(h)]), delta = 0;
        const double sink = total;
        for (Count j = 0; j < c.seq; ++j) {
          if (!c.sees(b, i, j)) continue;
          double s = 0;
          for (Count d = 0; d < c.dim; ++d) s += qkv[at(i, q + d)] * qkv[at(j, k + d)];
          s *= scale;
          if (c.cap > 0) {
            const double t = std::tanh(s / double(c.cap));
            s = double(c.cap) * t, slope[size(j)] = 1 - t * t;
          }
          total += p[size(j)] = std::exp(s);
          if (c.dropout > 0)
            kept[size(j)] =
                uniform_at(c.key(b), c.number(b, h, i, j)) >= c.dropout ? 1 / (1 - double(c.dropout)) : 0;
        }
        r.lse[size((b * c.heads + h) * c.seq + i)] = std::log(total);
        const std::size_t row = size(((b * c.seq + i) * c.heads + h) * c.dim);
        for (Count j = 0; total > 0 && j < c.seq; ++j) {
          p[size(j)] /= total;
          for (Count d = 0; d < c.dim; ++d)
            r.out[row + size(d)] += p[size(j)] * kept[size(j)] * qkv[at(j, v + d)];
        }
        for (Count d = 0; d < c.dim; ++d) delta += dout[row + size(d)] * r.out[row + size(d)];
        if (sink > 0) r.dsinks[size(h)] -= sink / total * delta;
        for (Count j = 0; j < c.seq; ++j) {
          double dp = 0;
          for (Count d = 0; d < c.dim; ++d) dp += dout[row + size(d)] * qkv[at(j, v + d)];
          const double ds = p[size(j)] * (dp * kept[size(j)] - delta) * slope[size(j)] * scale;
          for (Count d = 0; d < c.dim; ++d) {
            r.dqkv[at(i, q + d)] += ds * qkv[at(j, k + d)];
            r.dqkv[at(j, k + d)] += ds * qkv[at(i, q + d)];
            r.dqkv[at(j, v + d)] += p[size(j)] * kept[size(j)] * dout[row + size(d)];
          }
        }
      }
    }
  return r;
}

inline Tensor random(Machine& m, const Shape& shape, DType dtype, std::uint64_t stream) {
  Tensor x = m.empty(shape, dtype);
  m.kernels.fill_normal(x, {7, stream}, 0, 0.0, 1.0);
  return x;
}
inline Values values(Machine& m, const Tensor& x) {
  return values_of(m.host(x));
}

/// Some rows of one sequence of x [batch, seq, width], as a batch of one.
inline Tensor rows_of(const Tensor& x, Count begin, Count end) {
  const Count width = x.shape().back();
  return x.range(begin * width, end * width).reshape({1, end - begin, width});
}

/// The tensors of one call of each direction.
struct Pass {
  Tensor qkv, dout, out, lse, dqkv, sinks, dsinks;
  Pass(Machine& m, const Case& c, DType dtype)
      : qkv(random(m, {c.batch, c.seq, c.width()}, dtype, 1)),
        dout(random(m, {c.batch, c.seq, c.heads * c.dim}, dtype, 2)),
        out(random(m, {c.batch, c.seq, c.heads * c.dim}, dtype, 3)),
        lse(random(m, {c.batch, c.heads, c.seq}, dtype == DType::f64 ? DType::f64 : DType::f32, 4)),
        dqkv(random(m, {c.batch, c.seq, c.width()}, dtype, 5)) {
    m.kernels.attention(qkv, c.geometry(), out, lse);
    if (c.sinks) {
      sinks = random(m, {c.heads}, dtype, 6), dsinks = random(m, {c.heads}, lse.dtype(), 7);
      m.kernels.attention_sinks(sinks, out, lse);
      m.kernels.attention_sinks_backward(sinks, out, lse, dout, dsinks, false);
    }
    m.kernels.attention_backward(qkv, c.geometry(), out, lse, dout, dqkv);
  }
};

/// Largest difference relative to the largest wanted value's magnitude.
inline double worst(const Values& got, const Values& want) {
  double difference = 0, magnitude = 1e-300;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    difference = std::max(difference, std::abs(got[i] - want[i]));
    magnitude = std::max(magnitude, std::abs(want[i]));
  }
  return difference / magnitude;
}

/// Queries that see no key have a log-sum-exp of -inf; 0 where it is as it should be.
inline Values seen(Values lse, const Values& want) {
  for (std::size_t i = 0; i < lse.size(); ++i)
    if (want[i] == -INFINITY && lse[i] == -INFINITY) lse[i] = 0;
  return lse;
}

inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-13;
    case DType::f32:
      return 4e-6;
    case DType::f16:
      return 3e-3;
    default:
      return 2e-2;
  }
}

/// Both directions of a call are what the definition says.
inline void expect_definition(Machine& m, const Case& c, DType dtype) {
  SCOPED_TRACE(cat(c.str(), " on ", m.name()));
  const Pass run(m, c, dtype);
  const Values sinks = c.sinks ? values(m, run.sinks) : Values();
  const Result want = reference(c, values(m, run.qkv), values(m, run.dout), sinks);
  EXPECT_LE(worst(values(m, run.out), want.out), tolerance(dtype));
  EXPECT_LE(worst(seen(values(m, run.lse), want.lse), seen(want.lse, want.lse)), tolerance(dtype));
  EXPECT_LE(worst(values(m, run.dqkv), want.dqkv), tolerance(dtype));
  if (c.sinks) EXPECT_LE(worst(values(m, run.dsinks), want.dsinks), 2 * tolerance(dtype));
}

/// A call has the same bits with any number of threads and every time.
inline void expect_repeatable(const Case& c, DType dtype) {
  on_machines(
      dtype == DType::f16 ? in_part(all_machines(), dtype) : all_machines(),
      [&](Machine& m) {
        const Pass run(m, c, dtype), again(m, c, dtype);
        EXPECT_EQ(values(m, run.out), values(m, again.out));
        EXPECT_EQ(values(m, run.dqkv), values(m, again.dqkv));
        return std::vector<Tensor>{run.out, run.lse, run.dqkv};
      },
      [](const std::vector<Tensor>&) {});
}

}  // namespace sherd::test::attention

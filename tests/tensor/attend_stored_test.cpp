#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/kernel_machines.h"

namespace sherd::tensor {
namespace {

using namespace sherd::test;
using Count = std::int64_t;
using Values = std::vector<double>;

/// The rows of one sequence in one call.
struct Rows {
  Count text, first, count;
};
struct Call {
  Count seq;
  std::vector<Rows> rows;
  bool stores_only = false;
};

struct Case {
  int heads, kv_heads;
  Count dim, texts, capacity, window;
  std::vector<Call> calls;
  float scale = 0;

  Count group() const { return heads / kv_heads; }
  Count width() const { return (heads + 2 * kv_heads) * dim; }
  Attention geometry() const {
    return {.heads = heads, .kv_heads = kv_heads, .window = window, .scale = scale, .key = {}};
  }
  Values input(std::size_t call, DType dtype) const {
    return normals_in(dtype, std::ssize(calls[call].rows) * calls[call].seq * width(), 7 + call);
  }
};

std::vector<Case> cases() {
  const Call prompt{6, {{2, 0, 6}, {0, 0, 3}}}, next{1, {{0, 3, 1}, {2, 6, 1}}},
      more{1, {{2, 7, 1}, {0, 4, 1}}};
  std::vector<Call> long_text{{40, {{0, 0, 40}}, true}};
  for (Count at = 40; at < 45; ++at) long_text.push_back({1, {{0, at, 1}}});
  return {{2, 2, 4, 3, 8, 0, {prompt, next, more}},
          {6, 2, 5, 3, 9, 0, {prompt, next, {3, {{2, 7, 2}, {0, 4, 3}, {1, 0, 1}}}}},
          {4, 1, 64, 3, 12, 0, {prompt, next, more}, 0.3f},
          {4, 2, 8, 3, 9, 3, {prompt, next, more}},
          {2, 1, 33, 3, 4, 4, {prompt, next, more, {5, {{0, 5, 5}}}}},
          {3, 3, 16, 3, 1, 1, {prompt, next}},
          {2, 2, 100, 1, 60, 0, long_text},
          {2, 1, 128, 1, 13, 13, long_text},
          {1, 1, 8, 2, 20, 30, {{6, {{1, 0, 6}, {0, 0, 2}}}, {1, {{1, 6, 1}}}}}};
}

/// Everything in double, from what all calls so far stored.
Values expected(const Case& c, std::size_t call, DType dtype) {
  std::vector<std::vector<Values>> keys(static_cast<std::size_t>(c.texts)),
      values = keys;  // by text, position
  Values out;
  for (std::size_t k = 0; k <= call; ++k) {
    const Values qkv = c.input(k, dtype);
    const Call& now = c.calls[k];
    out.assign(now.rows.size() * static_cast<std::size_t>(now.seq * c.heads * c.dim), 0);
    for (std::size_t b = 0; b < now.rows.size(); ++b)
      for (Count i = 0; i < now.rows[b].count; ++i) {
        const auto text = static_cast<std::size_t>(now.rows[b].text);
        const Count position = now.rows[b].first + i, row = (static_cast<Count>(b) * now.seq + i) * c.width();
        keys[text].resize(static_cast<std::size_t>(position + 1));
        values[text].resize(static_cast<std::size_t>(position + 1));
        const auto part = [&](Count column, Count count) {
          return Values(qkv.begin() + row + column, qkv.begin() + row + column + count);
        };
        Values& own_keys = keys[text].back();
        Values& own_values = values[text].back();
        for (Count g = 0; g < c.kv_heads; ++g)
          for (Count d = 0; d < c.dim; ++d) {
            const Count at = (g * (c.group() + 2) + c.group()) * c.dim + d;
            own_keys.push_back(qkv[static_cast<std::size_t>(row + at)]);
            own_values.push_back(qkv[static_cast<std::size_t>(row + at + c.dim)]);
          }
        const Count first = c.window > 0 ? std::max<Count>(0, position + 1 - c.window) : 0;
        for (Count h = 0; h < c.heads; ++h) {
          const Count g = h / c.group();
          const Values q = part((g * (c.group() + 2) + h % c.group()) * c.dim, c.dim);
          double sum = 0;
          Values mixed(q.size());
          for (Count j = first; j <= position; ++j) {
            double score = 0;
            for (Count d = 0; d < c.dim; ++d)
              score += q[static_cast<std::size_t>(d)] *
                       keys[text][static_cast<std::size_t>(j)][static_cast<std::size_t>(g * c.dim + d)];
            const double p =
                std::exp(score * (c.scale > 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.dim))));
            sum += p;
            for (Count d = 0; d < c.dim; ++d)
              mixed[static_cast<std::size_t>(d)] +=
                  p * values[text][static_cast<std::size_t>(j)][static_cast<std::size_t>(g * c.dim + d)];
          }
          for (Count d = 0; d < c.dim; ++d)
            out[static_cast<std::size_t>(((static_cast<Count>(b) * now.seq + i) * c.heads + h) * c.dim + d)] =
                mixed[static_cast<std::size_t>(d)] / sum;
        }
      }
  }
  return out;
}

class AttendStored : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, AttendStored, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(AttendStored, SeesTheKeysOfItsTextAlone) {
  const DType dtype = GetParam();
  const double tolerance = dtype == DType::f32 ? 4e-6 : dtype == DType::f64 ? 1e-13 : 4 * roundoff(dtype);
  for (const Case& c : cases()) {
    SCOPED_TRACE(cat(c.heads, "/", c.kv_heads, " of ", c.dim, ", window ", c.window));
    on_every_machine(
        [&](Machine& m) {
          const Shape shape{c.texts, c.kv_heads, c.capacity, c.dim};
          KeyStore store{m.empty(shape, dtype), m.empty(shape, dtype), {}};
          m.kernels.fill(store.keys,
                         std::numeric_limits<double>::quiet_NaN());  // nobody reads what nobody stored
          m.kernels.fill(store.values, std::numeric_limits<double>::quiet_NaN());
          std::vector<Tensor> outs;
          for (std::size_t k = 0; k < c.calls.size(); ++k) {
            const Call& call = c.calls[k];
            std::vector<std::int32_t> places;
            for (const Rows& r : call.rows)
              for (const Count n : {r.text, r.first, r.count}) places.push_back(static_cast<std::int32_t>(n));
            const Count batch = std::ssize(call.rows);
            store.places = m.ids({batch, 3}, places);
            const Tensor qkv = m.of({batch, call.seq, c.width()}, dtype, c.input(k, dtype));
            const Tensor out =
                call.stores_only ? Tensor() : m.empty({batch, call.seq, c.heads * c.dim}, dtype);
            m.kernels.attend_stored(qkv, c.geometry(), store, out);
            if (out) outs.push_back(out);
          }
          return outs;
        },
        [&](const std::vector<Tensor>& got) {
          std::size_t at = 0;
          for (std::size_t k = 0; k < c.calls.size(); ++k) {
            if (c.calls[k].stores_only) continue;
            const Values want = expected(c, k, dtype), values = values_of(got[at++]);
            ASSERT_EQ(values.size(), want.size());
            for (std::size_t i = 0; i < want.size(); ++i)
              ASSERT_NEAR(values[i], want[i], tolerance) << "call " << k << ", element " << i;
          }
        });
    if (HasFatalFailure()) return;
  }
}

TEST(AttendStoredArguments, AreChecked) {
  const auto cpu = all_cpus();
  Machine& m = *cpu.front();
  const Tensor qkv = m.empty({1, 2, 12}, DType::f32), out = m.empty({1, 2, 4}, DType::f32);
  m.kernels.fill(qkv, 0);
  const Attention geometry{.heads = 1, .kv_heads = 1, .key = {}};
  const auto store = [&](const Shape& shape, std::vector<std::int32_t> places) {
    return KeyStore{m.empty(shape, DType::f32), m.empty(shape, DType::f32), m.ids({1, 3}, places)};
  };
  const auto refused = [&](const char* why, const KeyStore& with, Attention of) {
    testing::expect_error(ErrorKind::usage, why, [&] { m.kernels.attend_stored(qkv, of, with, out); });
  };
  Attention full = geometry;
  full.causal = false;
  refused("causal", store({1, 1, 4, 4}, {0, 0, 2}), full);
  refused("heads of 4", store({1, 1, 4, 5}, {0, 0, 2}), geometry);
  refused("text 1 of 1", store({1, 1, 4, 4}, {1, 0, 2}), geometry);
  refused("3 of 2 rows", store({1, 1, 4, 4}, {0, 0, 3}), geometry);
  refused("position 4", store({1, 1, 4, 4}, {0, 3, 2}), geometry);
}

}  // namespace
}  // namespace sherd::tensor

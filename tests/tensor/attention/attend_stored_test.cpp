#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::tensor {
namespace {

using namespace sherd::test;
using Count = std::int64_t;
using Values = std::vector<double>;

/// The rows of one sequence in one call.
struct Rows {
  Count text, first, count;
};
struct StoredCall {
  Count seq;
  std::vector<Rows> rows;
  bool stores_only = false;
};

struct StoredCase {
  int heads, kv_heads;
  Count dim, texts, capacity, window;
  std::vector<StoredCall> calls;
  float scale = 0;
  float cap = 0;
  bool sinks = false;

  Count group() const { return heads / kv_heads; }
  Count width() const { return (heads + 2 * kv_heads) * dim; }
  Attention geometry() const {
    return {.heads = heads, .kv_heads = kv_heads, .window = window, .scale = scale, .cap = cap, .key = {}};
  }
  Values sink_scores(DType dtype) const { return normals_in(dtype, heads, 3); }
  const Values& input(std::size_t call, DType dtype) const {
    Values& made = inputs_[{call, dtype}];
    if (made.empty())
      made = normals_in(dtype, std::ssize(calls[call].rows) * calls[call].seq * width(), 7 + call);
    return made;
  }
  mutable std::map<std::pair<std::size_t, DType>, Values> inputs_{};  // each machine asks for them
};

std::vector<StoredCase> stored_cases() {
  const StoredCall prompt{6, {{2, 0, 6}, {0, 0, 3}}}, next{1, {{0, 3, 1}, {2, 6, 1}}},
      more{1, {{2, 7, 1}, {0, 4, 1}}};
  std::vector<StoredCall> long_text{{40, {{0, 0, 40}}, true}};
  for (Count at = 40; at < 45; ++at) long_text.push_back({1, {{0, at, 1}}});
  return {{2, 2, 4, 3, 8, 0, {prompt, next, more}},
          {6, 2, 5, 3, 9, 0, {prompt, next, {3, {{2, 7, 2}, {0, 4, 3}, {1, 0, 1}}}}},
          {4, 1, 64, 3, 12, 0, {prompt, next, more}, 0.3f},
          {4, 2, 8, 3, 9, 3, {prompt, next, more}},
          {2, 1, 33, 3, 4, 4, {prompt, next, more, {5, {{0, 5, 5}}}}},
          {3, 3, 16, 3, 1, 1, {prompt, next}},
          {2, 2, 100, 1, 60, 0, long_text},
          {2, 1, 128, 1, 13, 13, long_text},
          {1, 1, 8, 2, 20, 30, {{6, {{1, 0, 6}, {0, 0, 2}}}, {1, {{1, 6, 1}}}}},
          {6, 2, 5, 3, 9, 0, {prompt, next}, 0, 0.6f},
          {4, 2, 8, 3, 9, 3, {prompt, next, more}, 0, 0, true},
          {4, 1, 64, 3, 12, 0, {prompt, next, more}, 0.3f, 2.0f, true},
          {38, 2, 4, 3, 9, 3, {prompt, next, more}, 0, 0, true}};  // more heads than a task takes
}

/// Texts of more keys than a block of a GPU takes at once (workspace.h): 128 for each row of a call.
std::vector<StoredCase> long_cases() {
  const auto begun = [](Count rows) { return StoredCall{rows, {{1, 0, rows}, {0, 0, rows / 2}}, true}; };
  const StoredCall none{1, {{1, 400, 0}, {0, 200, 1}}};  // a row that does not count
  return {{8, 2, 16, 3, 700, 0, {begun(640), {1, {{0, 320, 1}, {1, 640, 1}}}, {1, {{1, 641, 1}}}}},
          {5, 1, 24, 2, 500, 0, {begun(400), none, {1, {{1, 400, 1}, {0, 201, 1}}}}, 0.3f},
          {8, 4, 24, 2, 700, 0, {begun(640), {1, {{1, 640, 1}, {0, 320, 1}}}}, 400.0f},
          {2, 1, 8, 2, 4400, 0, {begun(4352), {1, {{1, 4352, 1}, {0, 2176, 1}}}}},
          {2, 2, 33, 2, 402, 0, {begun(385), {1, {{0, 192, 1}, {1, 385, 1}}}}},
          {8, 1, 64, 2, 290, 0, {begun(256), {1, {{0, 128, 1}, {1, 256, 1}}}, {1, {{0, 127, 1}}}}},
          {3, 1, 128, 2, 300, 0, {begun(260), {1, {{0, 130, 1}, {1, 260, 1}}}}},
          {1, 1, 256, 2, 300, 0, {begun(260), {1, {{0, 130, 1}, {1, 260, 1}}}}},
          // Rings, which more rows fill than they have, and of which blocks see both ends.
          {5, 1, 24, 2, 500, 0, {begun(400), none, {1, {{1, 400, 1}, {0, 201, 1}}}}, 0.3f, 1.5f, true},
          {4, 2, 8, 2, 300, 300, {begun(600), {1, {{1, 600, 1}, {0, 300, 1}}}, {1, {{1, 601, 1}}}}},
          {2, 1, 20, 2, 400, 280, {begun(500), {1, {{1, 500, 1}, {0, 250, 1}}}, {1, {{0, 251, 1}}}}},
          // Several rows: each sees those before it, and keys whose places later ones take.
          {4, 2, 8, 2, 700, 0, {begun(600), {2, {{1, 600, 2}, {0, 300, 1}}}, {3, {{0, 301, 3}}}}},
          {2, 1, 5, 2, 600, 600, {begun(599), {2, {{1, 599, 2}, {0, 299, 0}}}, {4, {{1, 601, 4}}}}},
          {2, 2, 16, 1, 9, 9, {{9, {{0, 0, 9}}}, {30, {{0, 9, 25}}}, {1, {{0, 34, 1}}}}}};
}

/// Everything in double, from what all calls so far stored.
Values stored_expected(const StoredCase& c, std::size_t call, DType dtype) {
  std::vector<std::vector<Values>> keys(static_cast<std::size_t>(c.texts)),
      values = keys;  // by text, position
  Values out;
  for (std::size_t k = 0; k <= call; ++k) {
    const Values& qkv = c.input(k, dtype);
    const StoredCall& now = c.calls[k];
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
        own_keys.clear(), own_values.clear();  // of a text that was taken back
        for (Count g = 0; g < c.kv_heads; ++g)
          for (Count d = 0; d < c.dim; ++d) {
            const Count at = (g * (c.group() + 2) + c.group()) * c.dim + d;
            own_keys.push_back(qkv[static_cast<std::size_t>(row + at)]);
            own_values.push_back(qkv[static_cast<std::size_t>(row + at + c.dim)]);
          }
        if (k < call) continue;
        const Count first = c.window > 0 ? std::max<Count>(0, position + 1 - c.window) : 0;
        for (Count h = 0; h < c.heads; ++h) {
          const Count g = h / c.group();
          const Values q = part((g * (c.group() + 2) + h % c.group()) * c.dim, c.dim);
          Values scores;
          for (Count j = first; j <= position; ++j) {
            const Values& all = keys[text][static_cast<std::size_t>(j)];
            const double product = std::inner_product(q.begin(), q.end(), all.begin() + g * c.dim, 0.0);
            const double score = product * (c.scale > 0 ? c.scale : 1 / std::sqrt(double(c.dim)));
            scores.push_back(c.cap > 0 ? double(c.cap) * std::tanh(score / double(c.cap)) : score);
          }
          const double top = *std::max_element(scores.begin(), scores.end());
          double sum = c.sinks ? std::exp(c.sink_scores(dtype)[static_cast<std::size_t>(h)] - top) : 0;
          Values mixed(q.size());
          for (Count j = first; j <= position; ++j) {
            const double p = std::exp(scores[static_cast<std::size_t>(j - first)] - top);
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

/// The results of a case's calls on one machine.
std::vector<Tensor> run(Machine& m, const StoredCase& c, DType dtype) {
  const Shape shape{c.texts, c.kv_heads, c.capacity, c.dim};
  KeyStore store{m.empty(shape, dtype), m.empty(shape, dtype), {}};
  // Nobody reads what nobody stored.
  m.kernels.fill(store.keys, std::numeric_limits<double>::quiet_NaN());
  m.kernels.fill(store.values, std::numeric_limits<double>::quiet_NaN());
  std::vector<Tensor> outs;
  for (std::size_t k = 0; k < c.calls.size(); ++k) {
    const StoredCall& call = c.calls[k];
    std::vector<std::int32_t> places;
    for (const Rows& r : call.rows)
      for (const Count n : {r.text, r.first, r.count}) places.push_back(static_cast<std::int32_t>(n));
    const Count batch = std::ssize(call.rows);
    store.places = m.ids({batch, 3}, places);
    const Tensor qkv = m.of({batch, call.seq, c.width()}, dtype, c.input(k, dtype));
    const Tensor out = call.stores_only ? Tensor() : m.empty({batch, call.seq, c.heads * c.dim}, dtype);
    const Tensor sinks = c.sinks ? m.of({c.heads}, dtype, c.sink_scores(dtype)) : Tensor();
    m.kernels.attend_stored(qkv, c.geometry(), store, sinks, out);
    if (out) outs.push_back(out);
  }
  return outs;
}

void expect_right(const std::vector<StoredCase>& cases, DType dtype) {
  for (const StoredCase& c : cases) {
    const double score = std::max(1.0, static_cast<double>(c.scale));  // whose rounding the scale enlarges
    const double tolerance = dtype == DType::f64   ? score * 1e-13
                             : dtype == DType::f32 ? score * 4e-6
                                                   : score * 4e-6 + 4 * roundoff(dtype);
    SCOPED_TRACE(cat(c.heads, "/", c.kv_heads, " of ", c.dim, ", window ", c.window));
    on_every_machine([&](Machine& m) { return run(m, c, dtype); },
                     [&](const std::vector<Tensor>& got) {
                       std::size_t at = 0;
                       for (std::size_t k = 0; k < c.calls.size(); ++k) {
                         if (c.calls[k].stores_only) continue;
                         const Values want = stored_expected(c, k, dtype), values = values_of(got[at++]);
                         ASSERT_EQ(values.size(), want.size());
                         for (std::size_t i = 0; i < want.size(); ++i)
                           ASSERT_NEAR(values[i], want[i], tolerance) << "call " << k << ", element " << i;
                       }
                     });
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(AttendStored, SeesTheKeysOfItsTextAlone) {
  expect_right(stored_cases(), GetParam());
}

TEST_P(AttendStored, SeesLongTexts) {
  if (!test::full_suite() && !test::gpu_run() && size_of(GetParam()) == 8)
    GTEST_SKIP() << "takes the emulator its time: fp32, bf16 and fp16 in the part";
  expect_right(long_cases(), GetParam());
}

/// How a batch is cut into blocks is nothing that a text's bits may show.
TEST_P(AttendStored, GivesATextTheSameBitsInAnyBatch) {
  const DType dtype = GetParam();
  const Count seq = 700, width = 8 * 16;
  const Attention geometry{.heads = 4, .kv_heads = 2, .key = {}};
  for (const auto& m : one_of_each()) {
    SCOPED_TRACE(m->name());
    const Shape shape{5, 2, seq, 16};
    const KeyStore store{m->of(shape, dtype, normals_in(dtype, shape.numel(), 1)),
                         m->of(shape, dtype, normals_in(dtype, shape.numel(), 2)),
                         {}};
    const auto rows = [&](Count first, Count batch) {
      std::vector<std::int32_t> places;
      for (Count b = first; b < first + batch; ++b)
        places.insert(places.end(),
                      {static_cast<std::int32_t>(b), static_cast<std::int32_t>(140 * b + 138), 1});
      const Values all = normals_in(dtype, 5 * width, 3);
      const Tensor qkv = m->of({batch, 1, width}, dtype,
                               Values(all.begin() + first * width, all.begin() + (first + batch) * width));
      const Tensor out = m->empty({batch, 1, 4 * 16}, dtype);
      m->kernels.attend_stored(qkv, geometry, {store.keys, store.values, m->ids({batch, 3}, places)}, {},
                               out);
      return bytes(*m, out);
    };
    std::vector<std::byte> alone;
    for (Count b = 0; b < 5; ++b) {
      const std::vector<std::byte> one = rows(b, 1);
      alone.insert(alone.end(), one.begin(), one.end());
    }
    EXPECT_TRUE(rows(0, 5) == alone);
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
    testing::expect_error(ErrorKind::usage, why, [&] { m.kernels.attend_stored(qkv, of, with, {}, out); });
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

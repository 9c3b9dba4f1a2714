#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/print_dtype.h"
#include "tensor/attention/attention_reference.h"

namespace sherd::tensor {
namespace {

using namespace test::attention;
using test::in_part, test::Machine, test::one_of_each;

const std::vector<Case>& attention_cases() {
  static const std::vector<Case> all = {{1, 1, 1, 1, 1},
                                        {2, 3, 2, 1, 5},
                                        {1, 7, 2, 2, 4, false},
                                        {2, 64, 2, 2, 64},
                                        {1, 131, 3, 1, 80},
                                        {1, 300, 1, 1, 32},
                                        {1, 130, 1, 1, 128, false},
                                        {2, 33, 4, 2, 7, true, 0.2f},
                                        {1, 132, 2, 2, 16, true, 0.5f},
                                        {1, 140, 2, 1, 8, false, 0.1f},
                                        {1, 70, 1, 1, 16, true, 0, 0.7f},
                                        {1, 193, 1, 1, 66, true, 0.3f},
                                        {1, 70, 2, 1, 200, true, 0.1f},
                                        // Parts of larger ones.
                                        {2, 33, 4, 2, 7, true, 0.2f, 0, {6, 100, 2, 64, 64}},
                                        {1, 140, 2, 1, 8, false, 0.1f, 0, {4, 281, 1, 141, 3}},
                                        {1, 64, 2, 2, 16, false, 0.3f, 0, {3, 70000, 1, 65536, 32768}},
                                        // Windows of one key, below, at and above the sizes of tiles.
                                        {1, 70, 2, 1, 16, true, 0.1f, 0, {}, 1},
                                        {2, 33, 4, 2, 7, true, 0.2f, 0, {}, 5},
                                        {1, 131, 2, 1, 20, true, 0, 0, {}, 31},
                                        {1, 300, 1, 1, 16, true, 0.1f, 0, {}, 64},
                                        {1, 300, 1, 1, 18, true, 0, 0, {}, 129},
                                        {1, 193, 1, 1, 10, true, 0.3f, 0, {}, 192},
                                        {1, 70, 1, 1, 200, true, 0.1f, 0, {}, 40},
                                        // Parts whose queries see the end of other keys, or none.
                                        {2, 70, 1, 1, 8, true, 0.1f, 0, {4, 210, 1, 140, 70}, 90},
                                        {1, 140, 2, 1, 8, true, 0.1f, 0, {4, 420, 1, 280, 140}, 40},
                                        {1, 90, 2, 2, 4, true, 0.2f, 0, {2, 300, 0, 100, 64}, 50},
                                        {1, 90, 1, 1, 16, true, 0, 0, {2, 300, 0, 64, 110}},
                                        {1, 40, 1, 1, 8, true, 0, 0, {1, 200, 0, 160, 0}, 30},
                                        // Windows on both sides, of whole sequences and of parts.
                                        {2, 33, 4, 2, 7, false, 0.2f, 0, {}, 5},
                                        {1, 300, 1, 1, 16, false, 0.1f, 0, {}, 65},
                                        {1, 131, 2, 1, 20, false, 0, 0, {}, 1},
                                        {1, 140, 2, 1, 8, false, 0.1f, 0, {4, 420, 1, 140, 280}, 150},
                                        {1, 90, 2, 2, 4, false, 0.2f, 0, {2, 300, 0, 100, 64}, 50},
                                        // Capped scores, most of them bent; keys of nothing.
                                        {2, 33, 4, 2, 8, true, 0.2f, 0, {}, 0, {}, 0.7f},
                                        {2, 33, 4, 2, 8, true, 0.2f, 0, {}, 5, {}, 0, true},
                                        {1, 140, 2, 1, 66, false, 0, 0.5f, {}, 0, {}, 2.0f, true},
                                        {1, 131, 3, 1, 20, true, 0, 0, {}, 31, {}, 50.0f, true},
                                        {1, 40, 1, 1, 8, true, 0, 0, {1, 200, 0, 160, 0}, 30, {}, 3.0f, true},
                                        {1, 70, 2, 1, 64, true, 0, 0, {}, 0, {}, 1.5f},
                                        {3, 300, 2, 2, 5, true, 0, 0, {}, 0, {}, 0, true}};
  return all;
}

class AttentionOfDType : public ::testing::TestWithParam<DType> {
 protected:
  static void expect_definition(Machine& m, const Case& c) {
    test::attention::expect_definition(m, c, GetParam());
  }
};

TEST_P(AttentionOfDType, EqualsTheDefinitionForwardAndBackward) {
  // The emulator takes its time: half of the cases in fp32, the others in bf16, and a quarter of them in
  // fp16, whose kernels have the code of bf16, and in fp64, in which nothing trains.
  const bool all = test::full_suite() || test::gpu_run();
  const std::size_t step = GetParam() == DType::f32 || GetParam() == DType::bf16 ? 2 : 4,
                    first = GetParam() == DType::f32   ? 0
                            : GetParam() == DType::f16 ? 2
                                                       : 1;
  for (const auto& m : one_of_each())
    for (std::size_t i = 0; i < attention_cases().size(); ++i)
      if (all || m->family == "cpu" || i % step == first) expect_definition(*m, attention_cases()[i]);
}

TEST_P(AttentionOfDType, FitsCardsWithLittleSharedMemory) {
  if (test::gpu_run()) GTEST_SKIP() << "a GPU has the shared memory that it has";
  simt::set_shared_limit(simt::small_card_shared);
  Machine small(simt::Order::ascending);
  for (const Case& c :
       {Case{1, 70, 2, 1, 128}, Case{1, 40, 2, 2, 256, false}, Case{1, 70, 2, 1, 200, true, 0.1f}})
    expect_definition(small, c);
  simt::set_shared_limit(16 << 10);
  Machine none(simt::Order::ascending);
  sherd::testing::expect_error(ErrorKind::config, "this GPU has 16384", [&] {
    Pass(none, {1, 70, 1, 1, 64}, GetParam());
  });
  simt::set_shared_limit(simt::hopper_shared);
}

TEST_P(AttentionOfDType, IsTheSameToTheBitForAnyNumberOfThreadsAndEveryTime) {
  for (const Case& c : {Case{2, 150, 2, 1, 24, true, 0.1f, 0, {8, 400, 4, 150, 150}},
                        Case{1, 150, 2, 1, 8, true, 0.1f, 0, {}, 60}})
    expect_repeatable(c, GetParam());
}

TEST_P(AttentionOfDType, AWindowThatHidesNothingHasTheBitsOfNone) {
  for (const auto& m : in_part(one_of_each(), GetParam()))
    for (Case c : {Case{1, 70, 2, 1, 8, true, 0.1f}, Case{1, 64, 1, 1, 16, true, 0, 0, {1, 128, 0, 64, 0}}}) {
      const Pass none(*m, c, GetParam());
      for (const Count more : {Count{0}, INT64_MAX / 2}) {
        c.window = c.seq + c.scores.query - c.scores.key + more;
        const Pass wide(*m, c, GetParam());
        EXPECT_EQ(values(*m, wide.out), values(*m, none.out)) << c.str() << " on " << m->name();
        EXPECT_EQ(values(*m, wide.dqkv), values(*m, none.dqkv)) << c.str() << " on " << m->name();
      }
    }
}

/// The rows of a tensor [1, seq, width] from `first` on.
Values rows_from(Machine& m, const Tensor& x, Count first) {
  return values(m, x.range(first * x.shape().back(), x.numel()));
}

TEST_P(AttentionOfDType, NobodyLooksAtWhatLiesBeforeAllWindows) {
  const Case c{1, 420, 1, 1, 8, true, 0.1f, 0, {}, 70};
  constexpr Count hidden = 64, free = 300;  // tiles of up to 128 keys lie between
  for (const auto& m : in_part(one_of_each(), GetParam())) {
    const Pass clean(*m, c, GetParam());
    const Tensor qkv = m->empty(clean.qkv.shape(), GetParam());
    m->kernels.copy(clean.qkv, qkv);
    // NaN comes through where a mask alone is between.
    m->kernels.fill(qkv.range(0, hidden * c.width()), NAN);
    const Tensor out = m->empty(clean.out.shape(), GetParam()),
                 lse = m->empty(clean.lse.shape(), clean.lse.dtype()),
                 dqkv = m->empty(qkv.shape(), GetParam());
    m->kernels.attention(qkv, c.geometry(), out, lse);
    m->kernels.attention_backward(qkv, c.geometry(), out, lse, clean.dout, dqkv);
    EXPECT_EQ(rows_from(*m, out, free), rows_from(*m, clean.out, free)) << m->name();
    EXPECT_EQ(rows_from(*m, dqkv, free), rows_from(*m, clean.dqkv, free)) << m->name();
  }
}

INSTANTIATE_TEST_SUITE_P(All, AttentionOfDType,
                         ::testing::Values(DType::f32, DType::bf16, DType::f16, DType::f64), dtype_name);

TEST(Attention, GradientEqualsNumericDifferencesInDouble) {
  for (const auto& m : one_of_each())
    for (const Case& c : {Case{1, 5, 2, 1, 3, true, 0.2f}, Case{2, 4, 2, 2, 2, false},
                          Case{1, 9, 2, 1, 3, true, 0.2f, 0, {}, 4}, Case{1, 9, 2, 1, 3, false, 0, 0, {}, 3},
                          Case{1, 6, 1, 1, 2, true, 0, 0, {1, 20, 0, 12, 6}, 4}}) {
      const Pass run(*m, c, DType::f64);
      const Values dout = values(*m, run.dout), dqkv = values(*m, run.dqkv), x = values(*m, run.qkv);
      const auto loss = [&](std::size_t at, double value) {
        Values changed = x;
        changed[at] = value;
        m->kernels.attention(m->of(run.qkv.shape(), DType::f64, changed), c.geometry(), run.out, run.lse);
        const Values out = values(*m, run.out);
        double sum = 0;
        for (std::size_t i = 0; i < dout.size(); ++i) sum += dout[i] * out[i];
        return sum;
      };
      for (std::size_t i = 0; i < dqkv.size(); ++i) {
        const double step = 1e-5, slope = (loss(i, x[i] + step) - loss(i, x[i] - step)) / (2 * step);
        EXPECT_NEAR(dqkv[i], slope, 1e-8) << c.str() << " element " << i << " on " << m->name();
      }
    }
}

TEST(Attention, MaskedKeysHaveNoInfluence) {
  for (const auto& m : one_of_each())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Case c{1, 150, 1, 1, 16};
      const Pass clean(*m, c, dtype);
      Pass changed(*m, c, dtype);
      m->kernels.fill(changed.qkv.reshape({c.seq, c.width()}).rows(c.seq - 1, c.seq), 50);
      m->kernels.attention(changed.qkv, c.geometry(), changed.out, changed.lse);
      const Count before = (c.seq - 1) * c.dim;
      EXPECT_EQ(values(*m, clean.out.range(0, before)), values(*m, changed.out.range(0, before)))
          << m->name();
    }
}

TEST(Attention, KeysBeforeTheWindowHaveNoInfluence) {
  for (const auto& m : one_of_each())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
      for (const Count window : {1, 20, 100}) {
        const Case c{1, 150, 1, 1, 16, true, 0, 0, {}, window};
        const Pass clean(*m, c, dtype);
        Pass changed(*m, c, dtype);
        m->kernels.fill(changed.qkv.reshape({c.seq, c.width()}).rows(7, 8), 50);
        m->kernels.attention(changed.qkv, c.geometry(), changed.out, changed.lse);
        EXPECT_EQ(rows_from(*m, clean.out, 7 + window), rows_from(*m, changed.out, 7 + window)) << m->name();
        const Count last = 6 + window;  // the last one that sees row 7
        EXPECT_NE(values(*m, clean.out.range(last * c.dim, (last + 1) * c.dim)),
                  values(*m, changed.out.range(last * c.dim, (last + 1) * c.dim)))
            << m->name();
      }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const Case c{1, 140, 1, 1, 64, true, 0, 30.0f};
  for (const auto& m : one_of_each()) {
    const Pass run(*m, c, DType::f32);
    for (const Tensor* t : {&run.out, &run.lse, &run.dqkv})
      for (const double value : values(*m, *t)) ASSERT_TRUE(std::isfinite(value)) << m->name();
  }
}

TEST(Attention, NamesWhatDoesNotFit) {
  using sherd::testing::expect_error;
  Machine machine(CpuIsa::portable, 1);
  const Tensor qkv = random(machine, {1, 4, 24}, DType::f32, 1),
               out = random(machine, {1, 4, 8}, DType::f32, 2);
  const Tensor lse = random(machine, {1, 2, 4}, DType::f32, 3);
  const auto call = [&](const Attention& geometry, const Tensor& to) {
    return [&machine, qkv, geometry, to, lse] { machine.kernels.attention(qkv, geometry, to, lse); };
  };
  expect_error(ErrorKind::usage, "3 query heads cannot share 2",
               call({.heads = 3, .kv_heads = 2, .key = {}}, out));
  expect_error(ErrorKind::usage, "[1, 4, 24]", call({.heads = 5, .kv_heads = 5, .key = {}}, out));
  expect_error(ErrorKind::usage, "dropout 1",
               call({.heads = 2, .kv_heads = 2, .dropout = 1.0f, .key = {}}, out));
  expect_error(ErrorKind::usage, "a window of -1 keys",
               call({.heads = 2, .kv_heads = 2, .window = -1, .key = {}}, out));
  expect_error(ErrorKind::usage, "2 heads from head 3 on are not among 4",
               call({.heads = 2, .kv_heads = 2, .key = {}, .scores = {.heads = 4, .head = 3}}, out));
  expect_error(ErrorKind::usage, "4 tokens from position 5 on are not in a sequence of 8",
               call({.heads = 2, .kv_heads = 2, .key = {}, .scores = {.seq = 8, .key = 5}}, out));
  expect_error(ErrorKind::usage, "out",
               call({.heads = 2, .kv_heads = 2, .key = {}}, random(machine, {1, 4, 7}, DType::f32, 4)));
}

}  // namespace
}  // namespace sherd::tensor

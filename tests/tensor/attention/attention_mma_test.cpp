// Attention by tensor cores, on the GPU or the emulator: which calls take it, and that each number is as near
// to the definition as its roundings let it be.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "device/stream.h"
#include "simt/counting_queue.h"
#include "support/full_suite.h"
#include "tensor/attention/attention_reference.h"

namespace sherd::tensor {
namespace {

using namespace test::attention;
using test::in_part, test::Machine, test::one_of_each;

/// How far numbers may be from the definition where weights and slopes of scores are rounded to 16 bits
/// before the second product, sums are fp32, and results are rounded once.
class Bounds {
 public:
  Bounds(const Case& c, const Values& qkv, const Values& dout, const Result& want, DType dtype)
      : c_(c),
        qkv_(qkv),
        dout_(dout),
        want_(want),
        unit_(dtype == DType::bf16 ? 0x1p-8 : 0x1p-11),
        least_(dtype == DType::bf16 ? 0 : 0x1p-24) {
    for (double x : want.out) out.push_back(unit_ * std::abs(x) + least_);
    for (double x : want.dqkv) dqkv.push_back(unit_ * std::abs(x) + least_);
    for (Count b = 0; b < c.batch; ++b)
      for (Count h = 0; h < c.heads; ++h)
        for (Count i = 0; i < c.seq; ++i) add_query(b, h, i);
  }
  Values out, dqkv;

 private:
  std::size_t at(Count b, Count row, Count col) const {
    return static_cast<std::size_t>((b * c_.seq + row) * c_.width() + col);
  }

  void add_query(Count b, Count h, Count i) {
    const Count group = c_.heads / c_.kv_heads, first = h / group * (group + 2);
    const Count q = (first + h % group) * c_.dim, k = (first + group) * c_.dim, v = k + c_.dim;
    const auto row = static_cast<std::size_t>(((b * c_.seq + i) * c_.heads + h) * c_.dim);
    const double scale = c_.scale != 0 ? double(c_.scale) : 1 / std::sqrt(double(c_.dim));
    const double lse = want_.lse[static_cast<std::size_t>((b * c_.heads + h) * c_.seq + i)];
    struct Key {
      Count j;
      double p, kept, product, reach;
    };
    std::vector<Key> keys;
    for (Count j = 0; j < c_.seq; ++j) {
      if (!c_.sees(b, i, j)) continue;
      double s = 0, product = 0, reach = 0;
      for (Count d = 0; d < c_.dim; ++d) {
        s += qkv_[at(b, i, q + d)] * qkv_[at(b, j, k + d)] * scale;
        const double term = dout_[row + std::size_t(d)] * qkv_[at(b, j, v + d)];
        product += term, reach += std::abs(term);
      }
      const bool drops = c_.dropout > 0 && uniform_at(c_.key(b), c_.number(b, h, i, j)) < c_.dropout;
      keys.push_back({j, std::exp(s - lse), drops ? 0 : 1 / (1 - double(c_.dropout)), product, reach});
    }
    double delta = 0, delta_error = 0;
    for (Count d = 0; d < c_.dim; ++d) {
      const std::size_t o = row + std::size_t(d);
      for (const Key& key : keys)
        out[o] += ((unit_ + noise) * key.p + least_) * key.kept * std::abs(qkv_[at(b, key.j, v + d)]);
      delta += dout_[o] * want_.out[o];
      delta_error += std::abs(dout_[o]) * (out[o] + noise * std::abs(want_.out[o]));
    }
    for (const Key& key : keys) {
      const double slope = std::abs(key.p * (key.product * key.kept - delta));
      const double error =
          (unit_ + noise) * slope + least_ + key.p * (delta_error + noise * key.reach * key.kept);
      for (Count d = 0; d < c_.dim; ++d) {
        dqkv[at(b, i, q + d)] += scale * error * std::abs(qkv_[at(b, key.j, k + d)]);
        dqkv[at(b, key.j, k + d)] += scale * error * std::abs(qkv_[at(b, i, q + d)]);
        dqkv[at(b, key.j, v + d)] +=
            ((unit_ + noise) * key.p + least_) * key.kept * std::abs(dout_[row + std::size_t(d)]);
      }
    }
  }

  static constexpr double noise = 0x1p-16;  // of fp32's scores, powers and sums, relative
  const Case& c_;
  const Values &qkv_, &dout_;
  const Result& want_;
  const double unit_;   // of a rounding
  const double least_;  // and of a number near 0, absolute
};

void expect_within(const Values& got, const Values& want, const Values& bound, const char* what) {
  for (std::size_t i = 0; i < want.size(); ++i)
    ASSERT_LE(std::abs(got[i] - want[i]), bound[i])
        << what << " " << i << " is " << got[i] << ", not " << want[i];
}

void expect_near_definition(Machine& m, const Case& c, DType dtype) {
  SCOPED_TRACE(cat(c.str(), " on ", m.name()));
  const Pass run(m, c, dtype);
  const Values qkv = values(m, run.qkv), dout = values(m, run.dout);
  const Result want = reference(c, qkv, dout);
  const Bounds bounds(c, qkv, dout, want, dtype);
  expect_within(values(m, run.out), want.out, bounds.out, "out");
  expect_within(values(m, run.dqkv), want.dqkv, bounds.dqkv, "dqkv");
  expect_within(seen(values(m, run.lse), want.lse), seen(want.lse, want.lse), Values(want.lse.size(), 1e-5),
                "lse");
}

/// Every step of head dims, around the sizes of tiles, with each kind of mask.
const std::vector<Case>& mma_cases() {
  static const std::vector<Case> all = {
      {1, 1, 1, 1, 16},
      {1, 2, 2, 1, 48, false},
      {2, 63, 2, 1, 32},
      {1, 64, 1, 1, 64, false, 0.2f},
      {1, 65, 3, 1, 80},
      {2, 66, 4, 2, 16, true, 0.1f},
      {1, 97, 1, 1, 96, false},
      {1, 130, 2, 1, 112, true, 0.3f},
      {1, 129, 2, 1, 128},
      {1, 70, 1, 1, 16, false, 0, 0.7f},
      // Windows of one key, below, at and above the sizes of tiles.
      {1, 70, 2, 1, 16, true, 0.1f, 0, {}, 1},
      {1, 131, 2, 1, 48, true, 0, 0, {}, 31},
      {1, 200, 1, 1, 32, true, 0.1f, 0, {}, 64},
      {1, 200, 1, 1, 128, true, 0, 0, {}, 65},
      // Tiles of which all rows of a lane see all but the last or the first row.
      {1, 63, 1, 1, 16, false},
      {1, 140, 1, 1, 32, true, 0, 0, {}, 57},
      {1, 100, 1, 1, 128, true, 0, 0, {}, 57},
      {1, 90, 1, 1, 32, true, 0, 0, {1, 300, 0, 71, 64}},
      {1, 90, 1, 1, 128, true, 0, 0, {1, 300, 0, 71, 64}},
      // Parts of larger ones: of which heads, all keys, the end of other keys, or none.
      {2, 33, 4, 2, 16, true, 0.2f, 0, {6, 101, 2, 64, 64}},
      {1, 75, 2, 1, 32, false, 0.1f, 0, {4, 151, 1, 76, 3}},
      {1, 64, 2, 2, 96, false, 0.3f, 0, {3, 70000, 1, 65536, 32768}},
      {2, 70, 1, 1, 16, true, 0.1f, 0, {4, 210, 1, 140, 70}, 90},
      {1, 90, 1, 1, 64, true, 0, 0, {2, 300, 0, 64, 110}},
      {1, 40, 1, 1, 128, true, 0, 0, {1, 200, 0, 160, 0}, 30},
      // Documents.
      {1, 40, 2, 1, 16, true, 0, 0, {}, 0, {0, 1, 18, 19, 20, 40}},
      {2, 150, 4, 2, 32, true, 0.3f, 0, {}, 0, {0, 65, 66, 150, 279, 300}},
      {1, 140, 2, 1, 80, false, 0.1f, 0, {}, 0, {0, 70, 140}},
      {1, 140, 2, 1, 128, true, 0.1f, 0, {}, 20, {0, 130, 130, 140}},
      {2, 66, 2, 1, 64, true, 0.4f, 0, {6, 66, 2}, 0, {0, 65, 66, 96, 132}}};
  return all;
}

class AttentionByTensorCores : public ::testing::TestWithParam<DType> {};

/// In part, each case in one of the two dtypes: the emulator takes its time.
TEST_P(AttentionByTensorCores, IsAsNearToTheDefinitionAsRoundingsLetItBe) {
  const bool all = test::full_suite() || test::gpu_run();
  for (const auto& m : one_of_each())
    if (m->family != "cpu")
      for (std::size_t i = all || GetParam() == DType::bf16 ? 0 : 1; i < mma_cases().size(); i += all ? 1 : 2)
        expect_near_definition(*m, mma_cases()[i], GetParam());
}

TEST_P(AttentionByTensorCores, FitsSmallCardsOrLeavesTheCallToOthers) {
  if (test::gpu_run()) GTEST_SKIP() << "a GPU has the shared memory that it has";
  for (const std::size_t bytes : {simt::small_card_shared, std::size_t{60} << 10}) {
    simt::set_shared_limit(bytes);
    Machine small(simt::Order::descending);
    expect_definition(small, {1, 70, 2, 1, 128, true, 0.1f}, GetParam());
  }
  simt::set_shared_limit(simt::hopper_shared);
}

/// A document's bits are its own: beside others, and alone where its scores have the same numbers. Others may
/// be NaN.
TEST_P(AttentionByTensorCores, DocumentsHaveTheirBitsWhereverTheyLie) {
  for (const auto& m : in_part(one_of_each(), GetParam()))
    for (const Case& c : {Case{1, 180, 2, 1, 16, true, 0.2f, 0, {}, 0, {0, 33, 150, 180}},
                          Case{1, 180, 4, 2, 80, false, 0, 0, {}, 0, {0, 33, 150, 180}},
                          Case{1, 180, 1, 1, 128, true, 0, 0, {}, 50, {0, 33, 150, 180}}}) {
      SCOPED_TRACE(cat(c.str(), " on ", m->name()));
      const Pass all(*m, c, GetParam());
      const auto run = [&](const Tensor& qkv, const Tensor& dout, const Attention& geometry) {
        const Tensor out = m->empty(dout.shape(), GetParam()), dqkv = m->empty(qkv.shape(), GetParam()),
                     lse = m->empty({1, c.heads, qkv.shape()[1]}, DType::f32);
        m->kernels.attention(qkv, geometry, out, lse);
        m->kernels.attention_backward(qkv, geometry, out, lse, dout, dqkv);
        return std::vector<Tensor>{out, dqkv};
      };
      const Values out = values(*m, rows_of(all.out, 33, 150)), dqkv = values(*m, rows_of(all.dqkv, 33, 150));
      Attention alone = c.geometry();
      alone.documents = nullptr, alone.lengths_vary = true;
      alone.scores = {.heads = c.heads, .seq = c.seq, .query = 33, .key = 33};
      alone.key = alone.key.at(0);
      const auto own = run(rows_of(all.qkv, 33, 150), rows_of(all.dout, 33, 150), alone);
      EXPECT_EQ(values(*m, own[0]), out);
      EXPECT_EQ(values(*m, own[1]), dqkv);
      const Tensor qkv = m->empty(all.qkv.shape(), GetParam()), dout = m->empty(all.dout.shape(), GetParam());
      m->kernels.fill(qkv, NAN), m->kernels.fill(dout, NAN);
      m->kernels.copy(rows_of(all.qkv, 33, 150), rows_of(qkv, 33, 150));
      m->kernels.copy(rows_of(all.dout, 33, 150), rows_of(dout, 33, 150));
      const auto beside = run(qkv, dout, c.geometry());
      EXPECT_EQ(values(*m, rows_of(beside[0], 33, 150)), out);
      EXPECT_EQ(values(*m, rows_of(beside[1], 33, 150)), dqkv);
    }
}

TEST_P(AttentionByTensorCores, IsTheSameToTheBitInAnyOrderOfThreads) {
  for (const Case& c : {Case{2, 100, 4, 2, 32, true, 0.1f, 0, {}, 60}, Case{1, 70, 2, 1, 128, false}})
    test::on_every_machine(
        [&](Machine& m) {
          const Pass run(m, c, GetParam());
          return std::vector<Tensor>{run.out, run.lse, run.dqkv};
        },
        [](const std::vector<Tensor>&) {});
}

INSTANTIATE_TEST_SUITE_P(All, AttentionByTensorCores, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

/// Threads of the blocks of the last kernel that a layer queues, on the emulator.
unsigned threads_of(const Case& c, DType dtype, Count offset = 0) {
  const auto device = device::make_cpu_device(1);
  test::CountingQueue queue;
  const auto kernels = test::make_emulated_kernels(*device, &queue);
  const auto some = [&](const Shape& shape) {
    return Tensor::empty(*device, {shape.numel() + offset}, dtype)
        .range(offset, shape.numel() + offset)
        .reshape(shape);
  };
  const Tensor qkv = some({c.batch, c.seq, c.width()}), out = some({c.batch, c.seq, c.heads * c.dim}),
               lse = Tensor::empty(*device, {c.batch, c.heads, c.seq},
                                   dtype == DType::f64 ? dtype : DType::f32);
  kernels->attention(qkv, c.geometry(), out, lse);
  const unsigned forward = queue.blocks.back().x;
  kernels->attention_backward(qkv, c.geometry(), out, lse, out, some(qkv.shape()));
  EXPECT_EQ(queue.blocks.back().x, forward);
  return forward;
}

TEST(AttentionByTensorCores, TakesHeadsInStepsOfSixteenUpTo128) {
  constexpr unsigned tensor_cores = 128, others = 256;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (Count dim = 16; dim <= 128; dim += 16)
      EXPECT_EQ(threads_of({1, 5, 2, 1, dim}, dtype), tensor_cores) << dim;
    EXPECT_EQ(threads_of({1, 5, 2, 1, 64, true, 0, 0, {}, 0, {0, 3, 5}}, dtype), tensor_cores);
    for (const Count dim : {8, 24, 100, 144}) EXPECT_EQ(threads_of({1, 5, 2, 1, dim}, dtype), others) << dim;
    EXPECT_EQ(threads_of({1, 5, 2, 1, 64}, dtype, 4), others);  // aligned to 8 bytes
    EXPECT_EQ(threads_of({1, 5, 2, 1, 64}, dtype, 8), tensor_cores);
  }
  for (const DType dtype : {DType::f32, DType::f64}) EXPECT_EQ(threads_of({1, 5, 2, 1, 64}, dtype), others);
}

}  // namespace
}  // namespace sherd::tensor

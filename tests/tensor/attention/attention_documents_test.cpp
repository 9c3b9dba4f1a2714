// Documents that share sequences: each has the attention that it has alone, by as few kernels as one sequence
// takes.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "device/stream.h"
#include "simt/counting_queue.h"
#include "support/expect_error.h"
#include "support/full_suite.h"
#include "tensor/attention/attention_reference.h"

namespace sherd::tensor {
namespace {

using namespace test::attention;
using test::in_part, test::Machine, test::one_of_each;

/// The bounds of documents of these lengths.
Documents of_lengths(const std::vector<Count>& lengths) {
  Documents bounds{0};
  for (const Count length : lengths) bounds.push_back(bounds.back() + length);
  return bounds;
}

/// `n` documents of 1, 2, … and `most` rows in turn, and the rows that they have.
std::vector<Count> many(Count n, Count most) {
  std::vector<Count> lengths;
  for (Count i = 0; i < n; ++i) lengths.push_back(i % most + 1);
  return lengths;
}
Count sum(const std::vector<Count>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), Count{0});
}

/// Two sequences of 150 documents each: more than one table of the GPU's kernels holds.
Case three_hundred() {
  std::vector<Count> lengths = many(150, 5);
  const Count seq = sum(lengths);
  lengths.insert(lengths.end(), lengths.begin(), lengths.end());
  return {2, seq, 1, 1, 4, true, 0.1f, 0, {}, 0, of_lengths(lengths)};
}

const std::vector<Case>& document_cases() {
  static const std::vector<Case> all = {
      {1, 1, 1, 1, 1, true, 0, 0, {}, 0, {0, 1}},
      {1, 40, 2, 1, 8, true, 0, 0, {}, 0, of_lengths({1, 17, 1, 1, 20})},
      {1, 33, 2, 2, 5, false, 0.2f, 0, {}, 0, of_lengths({3, 0, 29, 0, 0, 1, 0})},
      // Lengths around the sizes of tiles, in several sequences.
      {3, 140, 4, 2, 64, true, 0, 0, {}, 0, of_lengths({140, 64, 65, 11, 128, 12})},
      {2, 200, 2, 1, 10, true, 0.3f, 0, {}, 0, of_lengths({129, 63, 8, 1, 199})},
      {2, 150, 3, 1, 7, false, 0, 0.7f, {}, 0, of_lengths({70, 80, 150})},
      // Long heads.
      {1, 90, 1, 1, 128, true, 0.1f, 0, {}, 0, of_lengths({66, 24})},
      {1, 90, 2, 1, 200, true, 0, 0, {}, 0, of_lengths({10, 70, 10})},
      // Windows, also longer than documents.
      {2, 140, 2, 1, 16, true, 0.1f, 0, {}, 5, of_lengths({130, 10, 3, 137})},
      {1, 260, 2, 2, 12, true, 0, 0, {}, 70, of_lengths({200, 60})},
      // One rank's heads of several.
      {2, 66, 2, 1, 8, true, 0.4f, 0, {6, 66, 2}, 0, of_lengths({65, 1, 30, 36})},
      three_hundred()};
  return all;
}

class DocumentsOfDType : public ::testing::TestWithParam<DType> {};

/// In part, each case in one dtype of 16 bits and in a wider one: the emulator takes its time.
TEST_P(DocumentsOfDType, EqualTheDefinitionForwardAndBackward) {
  const bool all = test::full_suite() || test::gpu_run();
  const std::size_t first = GetParam() == DType::bf16 || GetParam() == DType::f64 ? 1 : 0;
  const std::size_t step = GetParam() == DType::f64 ? 4 : 2;  // which takes the emulator twice as long
  for (const auto& m : one_of_each())
    for (std::size_t i = all ? 0 : first; i < document_cases().size(); i += all ? 1 : step)
      expect_definition(*m, document_cases()[i], GetParam());
}

TEST_P(DocumentsOfDType, FitCardsWithLittleSharedMemory) {
  if (test::gpu_run()) GTEST_SKIP() << "a GPU has the shared memory that it has";
  simt::set_shared_limit(simt::small_card_shared);
  Machine small(simt::Order::ascending);
  expect_definition(small, {1, 70, 2, 1, 128, true, 0.1f, 0, {}, 0, of_lengths({40, 17, 13})}, GetParam());
  simt::set_shared_limit(simt::hopper_shared);
}

TEST_P(DocumentsOfDType, AreTheSameToTheBitForAnyNumberOfThreadsAndEveryTime) {
  expect_repeatable({2, 150, 2, 1, 24, true, 0.1f, 0, {}, 0, of_lengths({3, 100, 47, 1, 149})}, GetParam());
}

/// Each document's bits are those of a call of its own, told where its scores lie in the sequence.
TEST_P(DocumentsOfDType, HaveTheBitsOfCallsOfTheirOwn) {
  const Case whole{2, 140, 4, 2, 12, true, 0.3f, 0, {}, 0, of_lengths({65, 1, 74, 3, 137})},
      part{2, 66, 2, 1, 8, true, 0.4f, 0, {6, 66, 2}, 20, of_lengths({65, 1, 30, 36})};
  for (const auto& m : in_part(one_of_each(), GetParam()))
    for (const Case& c : {whole, part}) {
      SCOPED_TRACE(cat(c.str(), " on ", m->name()));
      const Pass all(*m, c, GetParam());
      const Values lse = values(*m, all.lse);
      for (std::size_t i = 1; i < c.documents.size(); ++i) {
        const Count begin = c.documents[i - 1], end = c.documents[i], b = begin / c.seq,
                    first = begin % c.seq;
        if (begin == end) continue;
        Attention own = c.geometry();
        own.documents = nullptr;
        own.lengths_vary = true;  // GPUs run documents by the own kernels
        if (own.scores.heads == 0) own.scores.heads = c.heads;
        own.scores.seq = c.seq, own.scores.query = own.scores.key = first;
        own.key = own.key.at(static_cast<std::uint64_t>(b));
        const Tensor qkv = rows_of(all.qkv, begin, end), dout = rows_of(all.dout, begin, end),
                     out = m->empty(dout.shape(), GetParam()), dqkv = m->empty(qkv.shape(), GetParam()),
                     own_lse = m->empty({1, c.heads, end - begin}, all.lse.dtype());
        m->kernels.attention(qkv, own, out, own_lse);
        m->kernels.attention_backward(qkv, own, out, own_lse, dout, dqkv);
        ASSERT_EQ(values(*m, rows_of(all.out, begin, end)), values(*m, out)) << i;
        ASSERT_EQ(values(*m, rows_of(all.dqkv, begin, end)), values(*m, dqkv)) << i;
        Values its;  // [batch, heads, seq]
        for (Count h = 0; h < c.heads; ++h) {
          const auto at = lse.begin() + (b * c.heads + h) * c.seq + first;
          its.insert(its.end(), at, at + end - begin);
        }
        ASSERT_EQ(its, values(*m, own_lse)) << i;
      }
    }
}

TEST_P(DocumentsOfDType, NobodyLooksAtOthers) {
  for (const bool causal : {true, false}) {
    const Case c{2, 150, 2, 1, 8, causal, 0.1f, 0, {}, 0, of_lengths({40, 75, 35, 150})};
    for (const auto& m : in_part(one_of_each(), GetParam())) {
      const Pass clean(*m, c, GetParam());
      const Tensor qkv = m->empty(clean.qkv.shape(), GetParam()),
                   dout = m->empty(clean.dout.shape(), GetParam()),
                   out = m->empty(clean.out.shape(), GetParam()),
                   lse = m->empty(clean.lse.shape(), clean.lse.dtype()),
                   dqkv = m->empty(qkv.shape(), GetParam());
      m->kernels.fill(qkv, NAN), m->kernels.fill(dout, NAN);
      m->kernels.copy(rows_of(clean.qkv, 40, 115), rows_of(qkv, 40, 115));
      m->kernels.copy(rows_of(clean.dout, 40, 115), rows_of(dout, 40, 115));
      m->kernels.attention(qkv, c.geometry(), out, lse);
      m->kernels.attention_backward(qkv, c.geometry(), out, lse, dout, dqkv);
      EXPECT_EQ(values(*m, rows_of(out, 40, 115)), values(*m, rows_of(clean.out, 40, 115))) << m->name();
      EXPECT_EQ(values(*m, rows_of(dqkv, 40, 115)), values(*m, rows_of(clean.dqkv, 40, 115))) << m->name();
    }
  }
}

TEST_P(DocumentsOfDType, ThatAreWholeSequencesHaveTheBitsOfNone) {
  Case c{2, 70, 2, 1, 6};  // heads of 6 are none for cuDNN
  for (const auto& m : in_part(one_of_each(), GetParam())) {
    c.documents = {};
    const Pass none(*m, c, GetParam());
    c.documents = {0, 70, 140};
    const Pass whole(*m, c, GetParam());
    EXPECT_EQ(values(*m, whole.out), values(*m, none.out)) << m->name();
    EXPECT_EQ(values(*m, whole.lse), values(*m, none.lse)) << m->name();
    EXPECT_EQ(values(*m, whole.dqkv), values(*m, none.dqkv)) << m->name();
  }
}

INSTANTIATE_TEST_SUITE_P(All, DocumentsOfDType,
                         ::testing::Values(DType::f32, DType::bf16, DType::f16, DType::f64),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

/// Kernels that one layer queues, on the emulator.
struct Counted {
  std::vector<device::Extent3> forward, backward;  ///< their grids

  explicit Counted(const Case& c) {
    const auto device = device::make_cpu_device(1);
    test::CountingQueue queue;
    const auto kernels = test::make_emulated_kernels(*device, &queue);
    const auto some = [&](const Shape& shape) { return Tensor::empty(*device, shape, DType::f32); };
    const Tensor qkv = some({c.batch, c.seq, c.width()}), out = some({c.batch, c.seq, c.heads * c.dim}),
                 lse = some({c.batch, c.heads, c.seq});
    kernels->attention(qkv, c.geometry(), out, lse);
    forward.swap(queue.grids);
    kernels->attention_backward(qkv, c.geometry(), out, lse, out, some(qkv.shape()));
    backward.swap(queue.grids);
  }
};

Case packed(const std::vector<Count>& lengths) {
  return {1, sum(lengths), 2, 1, 8, true, 0, 0, {}, 0, of_lengths(lengths)};
}

TEST(Documents, TakeTheKernelsOfOneSequence) {
  Case c = packed(many(40, 9));
  const Counted documents(c);
  c.documents = {};
  const Counted one(c);
  EXPECT_EQ(one.forward.size(), 1u);
  EXPECT_EQ(one.backward.size(), 3u);
  EXPECT_EQ(documents.forward.size(), one.forward.size());    // as calls of their own they would take 40
  EXPECT_EQ(documents.backward.size(), one.backward.size());  // and 120
  // Tables hold 256.
  for (const Count n : {256, 257, 512, 513}) {
    const Counted more(packed(many(n, 2)));
    const auto tables = static_cast<std::size_t>((n + 255) / 256);
    EXPECT_EQ(more.forward.size(), tables) << n;
    EXPECT_EQ(more.backward.size(), 1 + 2 * tables) << n;
  }
}

/// So that a graph of the work serves micro-batches whose documents are other ones.
TEST(Documents, ThatAreAboutAsManyTakeTheSameGrids) {
  std::vector<Count> lengths = many(40, 9), others = lengths;
  others[39] += others[38], others.erase(others.begin() + 38);
  const Counted some(packed(lengths)), same(packed(others));
  EXPECT_EQ(some.forward, same.forward);
  EXPECT_EQ(some.backward, same.backward);
}

TEST(Documents, RefuseBoundsThatAreNone) {
  for (const auto& m : one_of_each()) {
    const auto attend = [&](const Documents& bounds) {
      Case c{2, 4, 1, 1, 2};
      c.documents = bounds;
      Pass(*m, c, DType::f32);
    };
    const auto expect = [&](const char* message, const Documents& bounds) {
      sherd::testing::expect_error(ErrorKind::usage, message, [&] { attend(bounds); });
    };
    expect("attention: 2 bounds of documents do not go from 0 to 8 rows", {0, 4});
    expect("do not go from 0 to 8 rows", {1, 8});
    expect("a document of the rows 3 to 5 is not within a sequence of 4", {0, 3, 5, 8});
    expect("is not within", {0, 4, 2, 8});
  }
}

}  // namespace
}  // namespace sherd::tensor

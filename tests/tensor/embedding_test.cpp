#include <gtest/gtest.h>

#include <set>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

/// Ids with long runs of repeats, as texts have, and one id that makes up most of the rows.
std::vector<std::int32_t> some_ids(std::int64_t n, std::int32_t vocab) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto word = philox({5, 6}, i);
    out[i] =
        word[1] % 3 == 0 ? vocab - 1 : static_cast<std::int32_t>(word[0] % static_cast<std::uint32_t>(vocab));
  }
  return out;
}

class Embedding : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, Embedding, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(Embedding, gathers_rows_and_sums_their_gradients_in_index_order) {
  const DType dtype = GetParam();
  const bool f64 = dtype == DType::f64;
  for (const auto& [rows, vocab, width] :
       {std::tuple{0, 5, 4}, {1, 1, 1}, {37, 11, 3}, {600, 50, 301}, {5000, 70000, 2}}) {
    const std::vector<std::int32_t> ids = some_ids(rows, vocab);
    const std::vector<double> table = normals_in(dtype, vocab * width, 1),
                              dy = normals_in(dtype, rows * width, 2);
    on_every_machine(
        [&, rows = rows, vocab = vocab, width = width](Machine& m) {
          const Tensor t = m.of({vocab, width}, dtype, table), g = m.of({rows, width}, dtype, dy);
          const Tensor tids = m.ids({rows}, ids);
          Tensor out = m.empty({rows, width}, dtype), fresh = m.empty({vocab, width}, dtype),
                 added = m.of({vocab, width}, dtype, table),
                 wide = m.empty({vocab, width}, f64 ? dtype : DType::f32);
          m.kernels.fill(fresh, 7);
          m.kernels.embedding(tids, t, out);
          m.kernels.embedding_backward(tids, g, fresh, false);
          m.kernels.embedding_backward(tids, g, added, true);
          m.kernels.embedding_backward(tids, g, wide, false);
          return std::vector<Tensor>{out, fresh, added, wide};
        },
        [&, vocab = vocab, width = width](const std::vector<Tensor>& got) {
          std::vector<double> out, fresh(table.size()), added(table), wide;
          for (std::size_t i = 0; i < ids.size(); ++i)
            for (int c = 0; c < width; ++c) {
              const auto cell = static_cast<std::size_t>(ids[i] * width + c);
              out.push_back(table[cell]);
              // The contract's order, in the compute type.
              const auto step = [&](double sum) {
                sum += dy[i * static_cast<std::size_t>(width) + static_cast<std::size_t>(c)];
                return f64 ? sum : static_cast<double>(static_cast<float>(sum));
              };
              fresh[cell] = step(fresh[cell]);
              added[cell] = step(added[cell]);
            }
          wide = fresh;
          for (double& value : fresh) value = rounded(value, dtype);
          for (double& value : added) value = rounded(value, dtype);
          EXPECT_EQ(values_of(got[0]), out);
          EXPECT_EQ(values_of(got[1]), fresh);
          EXPECT_EQ(values_of(got[2]), added);
          EXPECT_EQ(values_of(got[3]), wide);
          EXPECT_EQ(got[1].shape(), (Shape{vocab, width}));
        });
    if (HasFatalFailure()) return;
  }
}

TEST_P(Embedding, holds_a_part_of_the_vocabulary) {
  const DType dtype = GetParam();
  const int rows = 600, vocab = 47, first = 17, held = 20, width = 37;
  const std::vector<std::int32_t> ids = some_ids(rows, vocab);
  const std::vector<double> table = normals_in(dtype, held * width, 1),
                            dy = normals_in(dtype, rows * width, 2);
  for (const std::int64_t all : {0, 47})  // the table's end, or further ids; 30 of them padding
    on_every_machine(
        [&](Machine& m) {
          const tensor::VocabSlice slice{.first = all == 0 ? vocab - held : first, .ids = all};
          const Tensor t = m.of({held, width}, dtype, table), g = m.of({rows, width}, dtype, dy);
          Tensor out = m.empty({rows, width}, dtype), fresh = m.empty({held, width}, dtype);
          m.kernels.fill(out, 5);
          m.kernels.fill(fresh, 5);
          m.kernels.embedding(m.ids({rows}, ids), t, out, slice);
          m.kernels.embedding_backward(m.ids({rows}, ids), g, fresh, false, slice);
          m.kernels.embedding_backward(m.ids({rows}, ids), g, t, true, slice);
          m.settle();  // nothing was wrong
          return std::vector<Tensor>{out, fresh, t};
        },
        [&](const std::vector<Tensor>& got) {
          const int begin = all == 0 ? vocab - held : first;
          std::vector<double> out(dy.size()), fresh(table.size()), added(table);
          const auto step = [&](double sum) {
            return dtype == DType::f64 ? sum : static_cast<double>(static_cast<float>(sum));
          };
          for (std::size_t i = 0; i < out.size(); ++i) {
            const int row = ids[i / width] - begin;
            if (row < 0 || row >= held) continue;
            const auto cell = static_cast<std::size_t>(row * width) + i % width;
            out[i] = table[cell];
            fresh[cell] = step(fresh[cell] + dy[i]);
            added[cell] = step(added[cell] + dy[i]);
          }
          for (double& value : fresh) value = rounded(value, dtype);
          for (double& value : added) value = rounded(value, dtype);
          EXPECT_EQ(values_of(got[0]), out);
          EXPECT_EQ(values_of(got[1]), fresh);
          EXPECT_EQ(values_of(got[2]), added);
        },
        Alike::to_the_bit);
}

TEST_P(Embedding, folds_the_rows_that_ids_name_as_if_the_gradient_had_been_formed_apart) {
  const DType dtype = GetParam();
  if (dtype == DType::f64) GTEST_SKIP() << "fp64 has no sums in fp32";
  const int rows = 200, vocab = 300, width = 129;
  const std::vector<std::int32_t> ids = some_ids(rows, vocab);
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    if (!m.kernels.folds_gradients()) continue;
    SCOPED_TRACE(m.name());
    for (const tensor::VocabSlice& slice :
         {tensor::VocabSlice{}, tensor::VocabSlice{.first = 30, .ids = vocab}})
      for (const DType to : std::set{dtype, DType::f32})
        for (const DType rounding : {DType::f32, DType::bf16, DType::f16})
          for (const bool accumulate : {false, true}) {
            const std::int64_t held = vocab - 2 * slice.first;
            // Tiny ones become zeros with a sign where they are rounded to fp16.
            std::vector<double> values = normals_in(dtype, rows * width, 2);
            for (std::size_t i = 0; i < values.size(); i += 3) values[i] *= 0x1p-28;
            const Tensor dy = m.of({rows, width}, dtype, values);
            const std::vector<double> before = normals_in(to, held * width, 3);
            const Tensor apart = m.empty({held, width}, to), want = m.of({held, width}, to, before),
                         got = m.of({held, width}, to, before);
            m.kernels.embedding_backward(m.ids({rows}, ids), dy, apart, false, slice);
            m.kernels.fold(apart, rounding, want, accumulate);
            m.kernels.embedding_backward(m.ids({rows}, ids), dy, got, accumulate, slice, rounding);
            ASSERT_EQ(bytes(m, got), bytes(m, want)) << name_of(rounding) << accumulate;
          }
  }
}

TEST_P(Embedding, positions_of_a_part_of_a_sequence) {
  const DType dtype = GetParam();
  using tensor::Positions;
  const std::int64_t batch = 3, seq = 6, most = 20;
  for (const int width : {1, 7, 64})
    for (const Positions& at :
         {Positions{.first = 5}, Positions{.first = 14, .count = 6},
          Positions{.first = 3, .count = 2, .second = 10}, Positions{.first = 16, .count = 3, .second = 0},
          Positions{.first = 2, .count = 4, .second = 6}}) {
      const std::vector<double> x = normals_in(dtype, batch * seq * width, 1),
                                table = normals_in(dtype, most * width, 2);
      on_every_machine(
          [&](Machine& m) {
            const Tensor tx = m.of({batch, seq, width}, dtype, x), t = m.of({most, width}, dtype, table);
            Tensor out = m.empty({batch, seq, width}, dtype), fresh = m.empty({most, width}, dtype);
            m.kernels.fill(fresh, 9);
            m.kernels.add_positions(tx, t, out, at);
            m.kernels.add_positions_backward(tx, fresh, false, at);
            m.kernels.add_positions_backward(tx, t, true, at);
            return std::vector<Tensor>{out, fresh, t};
          },
          [&](const std::vector<Tensor>& got) {
            std::vector<double> out(x), fresh(table.size());
            for (std::size_t i = 0; i < x.size(); ++i) {
              const auto row = static_cast<std::int64_t>(i) / width % seq;
              const std::int64_t position =
                  at.count > 0 && row >= at.count ? at.second + row - at.count : at.first + row;
              const auto cell =
                  static_cast<std::size_t>(position * width + static_cast<std::int64_t>(i) % width);
              out[i] += table[cell];
              fresh[cell] += x[i];
            }
            std::vector<double> added(table);
            for (std::size_t i = 0; i < added.size(); ++i) added[i] += fresh[i];
            expect_close(values_of(got[0]), out, dtype, 1, 0, "add_positions");
            expect_close(values_of(got[1]), fresh, dtype, 4, 8, "add_positions_backward");
            expect_close(values_of(got[2]), added, dtype, 4, 8, "add_positions_backward, accumulating");
          },
          Alike::to_the_bit);
      if (HasFatalFailure()) return;
    }
}

TEST_P(Embedding, positions_repeat_for_each_sequence_and_sum_over_the_batch) {
  const DType dtype = GetParam();
  for (const auto& [batch, seq, most, width] :
       {std::tuple{1, 1, 1, 1}, {2, 3, 5, 7}, {5, 40, 40, 301}, {0, 2, 3, 4}}) {
    const std::vector<double> x = normals_in(dtype, batch * seq * width, 1),
                              table = normals_in(dtype, most * width, 2);
    on_every_machine(
        [&, batch = batch, seq = seq, most = most, width = width](Machine& m) {
          const Tensor tx = m.of({batch, seq, width}, dtype, x), t = m.of({most, width}, dtype, table);
          Tensor out = m.empty({batch, seq, width}, dtype), fresh = m.empty({most, width}, dtype),
                 added = m.of({most, width}, dtype, table);
          m.kernels.fill(fresh, 9);
          m.kernels.add_positions(tx, t, out);
          m.kernels.add_positions_backward(tx, fresh, false);
          m.kernels.add_positions_backward(tx, added, true);
          return std::vector<Tensor>{out, fresh, added};
        },
        [&, batch = batch, seq = seq, most = most, width = width](const std::vector<Tensor>& got) {
          std::vector<double> out(x), fresh(table.size());
          for (int b = 0; b < batch; ++b)
            for (int i = 0; i < seq * width; ++i) {
              const auto at = static_cast<std::size_t>(b * seq * width + i);
              out[at] += table[static_cast<std::size_t>(i)];
              fresh[static_cast<std::size_t>(i)] += x[at];
            }
          std::vector<double> added(fresh);
          for (std::size_t i = 0; i < added.size(); ++i) added[i] += table[i];
          expect_close(values_of(got[0]), out, dtype, 1, 0, "add_positions");
          expect_close(values_of(got[1]), fresh, dtype, 4, 8, "add_positions_backward");
          expect_close(values_of(got[2]), added, dtype, 4, 8, "add_positions_backward, accumulating");
          for (int i = seq * width; i < most * width; ++i) {
            EXPECT_EQ(values_of(got[1])[static_cast<std::size_t>(i)], 0) << "a row past the sequence";
            EXPECT_EQ(values_of(got[2])[static_cast<std::size_t>(i)], table[static_cast<std::size_t>(i)]);
          }
        });
    if (HasFatalFailure()) return;
  }
}

TEST(EmbeddingErrors, name_the_id_its_position_and_the_vocabulary) {
  Machine m(CpuIsa::portable, 1);
  const Tensor table = m.empty({10, 4}, DType::f32), out = m.empty({3, 4}, DType::f32);
  using testing::expect_error;
  for (const std::int32_t bad : {10, -1}) {
    const Tensor ids = m.ids({3}, {0, bad, 9});
    const std::string message =
        cat("token id ", bad, " at position 1 of [3] is outside the vocabulary of 10");
    expect_error(ErrorKind::data, "embedding: " + message, [&] { m.kernels.embedding(ids, table, out); });
    expect_error(ErrorKind::data, "embedding_backward: " + message,
                 [&] { m.kernels.embedding_backward(ids, out, table, true); });
  }
  const Tensor fine = m.ids({3}, {0, 1, 9});
  expect_error(ErrorKind::usage, "do not fit values of [2, 4]", [&] {
    m.kernels.embedding(fine, table, m.empty({2, 4}, DType::f32));
  });
  expect_error(ErrorKind::usage, "ids must be int32",
               [&] { m.kernels.embedding(m.empty({3}, DType::i64), table, out); });
  expect_error(ErrorKind::usage, "a sequence of 11 is longer than the 10 learned positions", [&] {
    const Tensor x = m.empty({1, 11, 4}, DType::f32);
    m.kernels.add_positions(x, table, x);
  });
}

TEST(EmbeddingErrors, know_the_whole_vocabulary) {
  using testing::expect_error;
  for (const auto& each : one_of_each()) {
    Machine& m = *each;
    const Tensor table = m.of({3, 2}, DType::f32, {1, 2, 3, 4, 5, 6}), ids = m.ids({4}, {0, 6, 5, 7});
    const Tensor out = m.empty({4, 2}, DType::f32), sums = m.empty({3, 2}, DType::f32);
    for (const tensor::VocabSlice& slice : {tensor::VocabSlice{4, 0}, {5, 7}})  // up to 7, the latter padding
      for (const bool backward : {false, true})
        expect_error(ErrorKind::data, "id 7 at position 3 ", [&] {
          if (backward)
            m.kernels.embedding_backward(ids, out, sums, false, slice);
          else
            m.kernels.embedding(ids, table, out, slice);
          m.settle();
        });
    expect_error(ErrorKind::data, "outside the vocabulary of 7", [&] {
      m.kernels.embedding(ids, table, out, {5, 7});
      m.settle();
    });
    m.kernels.embedding(ids, table, out, {5, 8});
    m.settle();
    EXPECT_EQ(values_of(m.host(out)), (std::vector<double>{0, 0, 3, 4, 1, 2, 5, 6}));
    expect_error(ErrorKind::usage, "a part of the vocabulary from id -1 on", [&] {
      m.kernels.embedding(ids, table, out, {-1, 0});
    });
    const Tensor x = m.empty({1, 4, 2}, DType::f32), places = m.empty({9, 2}, DType::f32);
    expect_error(ErrorKind::usage, "a sequence of 10 is longer than the 9 learned positions",
                 [&] { m.kernels.add_positions(x, places, x, {.first = 1, .count = 2, .second = 8}); });
    expect_error(ErrorKind::usage, "two ranges of positions overlap: 4 to 6 and 3 to 5", [&] {
      m.kernels.add_positions_backward(x, places, true, {.first = 4, .count = 2, .second = 3});
    });
    expect_error(ErrorKind::usage, "must not be negative",
                 [&] { m.kernels.add_positions(x, places, x, {.first = -1}); });
  }
}

TEST(EmbeddingErrors, come_with_the_next_wait_where_kernels_run_on_their_own) {
  for (const auto& each : one_of_each()) {
    if (each->family == "cpu") continue;
    Machine& m = *each;
    const Tensor table = m.of({3, 2}, DType::f32, {1, 2, 3, 4, 5, 6}), ids = m.ids({4}, {2, 3, 0, -1});
    Tensor out = m.empty({4, 2}, DType::f32), sums = m.empty({3, 2}, DType::f32);
    using testing::expect_error;
    m.kernels.embedding(ids, table, out);
    expect_error(ErrorKind::data, "id 3 at position 1 is outside the vocabulary of 3", [&] { m.settle(); });
    EXPECT_EQ(values_of(m.host(out)), (std::vector<double>{5, 6, 0, 0, 1, 2, 0, 0}));
    m.settle();  // said once
    m.kernels.embedding_backward(ids, out, sums, false);
    expect_error(ErrorKind::data, "id 3 at position 1", [&] { m.settle(); });
    EXPECT_EQ(values_of(m.host(sums)), (std::vector<double>{1, 2, 0, 0, 5, 6}));
  }
}

}  // namespace
}  // namespace sherd::test

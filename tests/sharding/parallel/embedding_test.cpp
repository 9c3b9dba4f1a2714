#include "sharding/parallel/embedding.h"

#include <gtest/gtest.h>

#include "nn/layers.h"
#include "sharding/parallel/ranks.h"
#include "support/expect_error.h"

namespace sherd::parallel {
namespace {

using comm::Communicator;
using tensor::Tensor;
using test::Cpu;
using testing::expect_error;

constexpr std::int64_t table_rows = 24, vocabulary = 22, table_width = 5, ids_batch = 2, ids_seq = 12;

template <class Table>
void run_table(Cpu& cpu, Table& table, const Layout& layout, DType dtype, Found& found) {
  const test::PlainParameters held(*cpu.kernels, table, dtype, 3);
  found.add_parameters(cpu, "", held, layout);
  Tape tape(*cpu.kernels);
  const Var y = table(tape, cpu.ids({ids_batch, ids_seq}, 5, vocabulary));
  found.add_stream(cpu, "y", y.value(), layout);
  tape.backward({{y, stream_part(cpu, cpu.normal({ids_batch, ids_seq, table_width}, 2, dtype), layout)}});
  found.add_parameters(cpu, "gradient ", held, layout);
}

/// Rows looked up, and gradients added up, one by one.
std::map<std::string, std::vector<double>> embedding_by_hand(Cpu& cpu, const std::vector<double>& table) {
  std::vector<double> y, gradient(table.size());
  const std::vector<double> dy = cpu.values(cpu.normal({ids_batch, ids_seq, table_width}, 2));
  const Tensor ids = cpu.ids({ids_batch, ids_seq}, 5, vocabulary);
  for (std::int64_t i = 0; i < ids_batch * ids_seq; ++i)
    for (std::int64_t k = 0; k < table_width; ++k) {
      const std::int64_t at = ids.data<std::int32_t>()[i] * table_width + k;
      y.push_back(table[static_cast<std::size_t>(at)]);
      gradient[static_cast<std::size_t>(at)] += dy[static_cast<std::size_t>(i * table_width + k)];
    }
  return {{"weight", table}, {"y", y}, {"gradient weight", gradient}};
}

TEST(VocabEmbedding, IsATableInParts) {
  for (const int ranks : {1, 2, 3, 4})
    for (const bool sequence : {false, true}) {
      Found got, serial;
      on_ranks(ranks, [&](Cpu& cpu, Communicator& group) {
        const Layout layout{.tensor = &group, .sequence_parallel = sequence};
        VocabEmbedding table(table_rows, table_width, layout, nn::Init::normal(0, 0.5), vocabulary);
        EXPECT_EQ(table.weight()->shape[0], table_rows / ranks);
        run_table(cpu, table, layout, DType::f64, got);
      });
      Cpu cpu(1);
      nn::Embedding whole(table_rows, table_width, nn::Init::normal(0, 0.5));
      run_table(cpu, whole, {}, DType::f64, serial);
      expect_found(got, serial.all(), 1e-12, cat(ranks, " ranks"));
      expect_found(got, embedding_by_hand(cpu, serial.all().at("weight")), 1e-12,
                   cat(ranks, " ranks, by hand"));
    }
}

/// Each element comes from one rank, the others add zeros.
TEST(VocabEmbedding, NarrowTypesGiveTheSerialBits) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const bool sequence : {false, true}) {
      Found got, serial;
      on_ranks(3, [&](Cpu& cpu, Communicator& group) {
        const Layout layout{.tensor = &group, .sequence_parallel = sequence};
        VocabEmbedding table(table_rows, table_width, layout);
        run_table(cpu, table, layout, dtype, got);
      });
      Cpu cpu(1);
      nn::Embedding whole(table_rows, table_width);
      run_table(cpu, whole, {}, dtype, serial);
      expect_found(got, serial.all(), 0, std::string(name_of(dtype)));
    }
}

TEST(VocabEmbedding, RefusesIdsAndSizesThatDoNotFit) {
  on_ranks(2, [](Cpu& cpu, Communicator& group) {
    const Layout layout{.tensor = &group};
    VocabEmbedding table(table_rows, table_width, layout, nn::Init::normal(0, 1), vocabulary);
    const test::PlainParameters held(*cpu.kernels, table, DType::f32);
    Tape tape(*cpu.kernels);
    for (const std::int32_t id : {22, 23, 24, -1})
      expect_error(ErrorKind::data, std::to_string(id), [&] {
        table(tape, Tensor::of<std::int32_t>(*cpu.device, {1, 2}, std::vector<std::int32_t>{id, 0}));
      });
    expect_error(ErrorKind::usage, "has no equal parts for 2 ranks", [&] {
      table(tape, cpu.ids({1, 3}, 1, vocabulary));
    });
    expect_error(ErrorKind::config, "an embedding of 25 rows of 5 cannot be cut over 2 tensor-parallel ranks",
                 [&] { VocabEmbedding(25, 5, layout); });
    expect_error(ErrorKind::usage, "25 ids", [&] { VocabEmbedding(24, 5, layout, nn::Init::zeros(), 25); });
  });
}

}  // namespace
}  // namespace sherd::parallel

#include "sharding/parallel/sequence.h"

#include <gtest/gtest.h>

#include "comm/process_groups.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"

namespace sherd::parallel {
namespace {

constexpr std::int64_t stream_batch = 2, stream_width = 3;

void on_context_ranks(int ranks, const std::function<void(const Layout&, test::Cpu&)>& body) {
  for (const ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses})
    comm::run_local(ranks, {.timeout_seconds = 30}, [&](comm::Communicator& world) {
      test::Cpu cpu(1);
      body({.context = &world, .context_method = method}, cpu);
    });
}

/// Tokens are numbered by where they are in the whole, so that a wrong row shows.
TEST(Sequence, EachContextRankHasItsTokens) {
  for (const int ranks : {1, 2, 3})
    on_context_ranks(ranks, [&](const Layout& layout, test::Cpu& cpu) {
      const std::int64_t seq = 2 * layout.sequence_multiple();
      std::vector<std::int32_t> ids(static_cast<std::size_t>(stream_batch * seq));
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
      const auto whole = Tensor::of<std::int32_t>(*cpu.device, {stream_batch, seq}, ids);
      const Tensor part = inner_part(*cpu.kernels, whole, layout);
      const std::int64_t rows = seq / ranks;
      ASSERT_EQ(part.shape(), (tensor::Shape{stream_batch, rows}));
      for (std::int64_t b = 0; b < stream_batch; ++b)
        for (std::int64_t row = 0; row < rows; ++row)
          EXPECT_EQ(part.data<std::int32_t>()[b * rows + row],
                    b * seq + layout.inner_positions(rows).at(row));
    });
}

TEST(Sequence, IsPutTogetherInTheOrderOfPositions) {
  for (const int ranks : {1, 2, 3})
    on_context_ranks(ranks, [&](const Layout& layout, test::Cpu& cpu) {
      const std::int64_t rows = 2 * layout.sequence_multiple() / ranks, seq = rows * ranks;
      const Tensor whole = cpu.normal({stream_batch, seq, stream_width}, 1),
                   weights = cpu.normal({stream_batch, seq, stream_width}, 2);
      const tensor::Positions at = layout.inner_positions(rows);
      const auto of_this_rank = [&](const Tensor& all) {
        std::vector<double> out;
        for (std::int64_t b = 0; b < stream_batch; ++b)
          for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t i = 0; i < stream_width; ++i)
              out.push_back(all.data<double>()[(b * seq + at.at(row)) * stream_width + i]);
        return out;
      };
      autograd::Tape tape(*cpu.kernels);
      const Var mine = tape.variable(
          Tensor::of<double>(*cpu.device, {stream_batch, rows, stream_width}, of_this_rank(whole)));
      const Var all = gather_sequence(mine, layout);
      EXPECT_EQ(cpu.values(all.value()), cpu.values(whole));
      tape.backward({{all, weights}});
      EXPECT_EQ(cpu.values(mine.grad()), of_this_rank(weights));
    });
}

TEST(Sequence, ThatCannotBeCutIsADataError) {
  on_context_ranks(2, [](const Layout& layout, test::Cpu& cpu) {
    testing::expect_error(ErrorKind::data, "a multiple of", [&] {
      (void)inner_part(*cpu.kernels, cpu.ids({1, 2 * layout.sequence_multiple() + 1}, 1, 9), layout);
    });
  });
}

}  // namespace
}  // namespace sherd::parallel

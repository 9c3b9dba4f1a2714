#include "sharding/parallel/attention.h"
#include "comm/dry/dry_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "sharding/parallel/attention_ranks.h"
#include "sharding/parallel/ring_chunks.h"
#include "support/expect_error.h"

namespace sherd::parallel {
namespace {

using test::Cpu;
using testing::expect_error;

const std::vector<AttentionCase>& cases() {
  static const std::vector<AttentionCase> all = {{1, 48, 4, 4, 8},
                                                 {2, 48, 12, 12, 5, true, 0.2f},
                                                 {2, 24, 24, 12, 3, false, 0.1f},
                                                 {1, 24, 12, 12, 7, false},
                                                 {1, 600, 4, 4, 16, true, 0.1f},
                                                 {2, 48, 4, 4, 8, true, 0.2f, 1},
                                                 {2, 48, 4, 4, 5, true, 0, 7},
                                                 {1, 48, 4, 4, 8, true, 0.1f, 26},
                                                 {1, 48, 4, 4, 8, true, 0, 47},
                                                 {1, 480, 2, 2, 8, true, 0, 150},
                                                 {2, 48, 4, 4, 8, true, 0.2f, 7, 0.8f, true},
                                                 {1, 24, 12, 12, 7, false, 0, 0, 0, true}};
  return all;
}
/// Cases with more query heads than key-value heads, which Ulysses' ranks cannot share.
const std::vector<AttentionCase>& ring_cases() {
  static const std::vector<AttentionCase> all = {
      {2, 48, 6, 2, 5, true, 0.2f}, {1, 72, 3, 1, 7, false, 0.1f}, {2, 48, 6, 2, 5, true, 0.2f, 10, 0, true}};
  return all;
}

class AttentionOfRanks : public ::testing::TestWithParam<DType> {};

TEST_P(AttentionOfRanks, IsThatOfOneRank) {
  for (const ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses})
    for (const AttentionGrid grid : {AttentionGrid{1, 2}, AttentionGrid{1, 3}, AttentionGrid{1, 4},
                                     AttentionGrid{2, 2}, AttentionGrid{2, 1}})
      for (const AttentionCase& c : cases())
        if (method == ContextMethod::ring || c.kv_heads % (grid.tensor * grid.context) == 0)
          expect_one_ranks(c, grid, method, GetParam());
}

TEST_P(AttentionOfRanks, IsThatOfOneRankWithFewKeyValueHeadsInTheRing) {
  for (const AttentionGrid grid : {AttentionGrid{1, 2}, AttentionGrid{1, 3}, AttentionGrid{1, 4}})
    for (const AttentionCase& c : ring_cases()) expect_one_ranks(c, grid, ContextMethod::ring, GetParam());
}

TEST_P(AttentionOfRanks, ExchangesHeadsWhereThereAreFewerKeyValueHeadsThanRanks) {
  for (const AttentionGrid grid : {AttentionGrid{2, 1}, AttentionGrid{4, 1}, AttentionGrid{4, 2}})
    for (const AttentionCase& c :
         {AttentionCase{2, 16, 4, 1, 6, true, 0.1f}, AttentionCase{1, 12, 8, 2, 2, false, 0, 0, 0, true}})
      expect_one_ranks(c, grid, ContextMethod::ring, GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, AttentionOfRanks, ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST(AttentionOfRanks, SelectiveRecomputeMakesTheSameResultAgain) {
  for (const ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses})
    on_grid({1, 2}, method, [&](Cpu& cpu, const Layout& layout) {
      const AttentionCase c{2, 16, 2, 2, 4, true, 0.1f, 0, 0, true};
      const auto run = [&](Recompute recompute) {
        layout.context->reset_traffic();
        const RankPass pass(cpu, layout, c, DType::f32, recompute);
        return std::pair(test::bytes_of(pass.dqkv), layout.context->traffic().payload());
      };
      const auto kept = run(Recompute::none), again = run(Recompute::selective);
      EXPECT_EQ(kept.first, again.first);
      EXPECT_GT(again.second, kept.second) << "nothing was made again";
    });
}

TEST(AttentionOfRanks, NothingIsDroppedOutUnlessTraining) {
  for (const ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses})
    on_grid({1, 2}, method, [&](Cpu& cpu, const Layout& layout) {
      const AttentionCase with{1, 16, 2, 2, 4, true, 0.5f}, without{1, 16, 2, 2, 4};
      autograd::Tape tape(*cpu.kernels);
      tape.training = false;
      const auto out = [&](const AttentionCase& c) {
        return test::bytes_of(
            attention(tape.input(own_part(cpu, layout, c, DType::f32)), c.geometry(), layout).value());
      };
      EXPECT_EQ(out(with), out(without));
    });
}

TEST(AttentionOfRanks, SendsWhatTheFormulasSay) {
  constexpr std::uint64_t size = 2, sum = 4;  // of bf16 and of fp32
  // A window leaves out work, but no block.
  for (const auto& [ranks, window] : {std::pair{2, 0}, {3, 0}, {4, 0}, {4, 3}}) {
    const AttentionCase c{2, 48, 12, 12, 5, true, 0, window};
    const std::uint64_t rows = 2 * 48 / static_cast<std::uint64_t>(ranks),
                        others = static_cast<std::uint64_t>(ranks) - 1, keys = rows * 12 * 5 * 2,
                        all = static_cast<std::uint64_t>(ranks);
    on_grid({1, ranks}, ContextMethod::ring, [&](Cpu& cpu, const Layout& layout) {
      RankPass pass(cpu, layout, c, DType::bf16, Recompute::none, [&] {
        EXPECT_EQ(layout.context->traffic().payload(), others * keys * size);
        layout.context->reset_traffic();
      });
      EXPECT_EQ(layout.context->traffic().p2p, others * keys * size + all * keys * sum);
      EXPECT_EQ(layout.context->traffic().payload(), layout.context->traffic().p2p);
    });
    on_grid({1, ranks}, ContextMethod::ulysses, [&](Cpu& cpu, const Layout& layout) {
      const std::uint64_t four = 4 * rows * 12 * 5 * size * others / all;  // Q, K, V and the result
      RankPass pass(cpu, layout, c, DType::bf16, Recompute::none, [&] {
        EXPECT_EQ(layout.context->traffic().all_to_all, four);
        layout.context->reset_traffic();
      });
      EXPECT_EQ(layout.context->traffic().all_to_all, four);
      EXPECT_EQ(layout.context->traffic().payload(), four);
    });
  }
}

TEST(AttentionOfRanks, TheRingAttendsToWhatWindowsReachAlone) {
  constexpr int ranks = 4, chunk = 6;
  Cpu cpu(1);
  const Tensor qkv = cpu.normal({1, 2 * chunk, 3 * 4}, 1);
  for (const int window : {1, 2, 6, 7, 8, 13, 14, 48, 0}) {
    int pairs = 0;
    for (int rank = 0; rank < ranks; ++rank)
      for (int from = 0; from < ranks; ++from)
        pairs += static_cast<int>(
            RingChunks(*cpu.kernels, rank, ranks, qkv, {.window = window, .key = {}}).pairs(from).size());
    // The first query of a chunk sees window - 1 tokens before it.
    int expected = 0;
    for (int own = 0; own < 2 * ranks; ++own)
      expected += 1 + (window == 0 ? own : std::min(own, (window - 1 + chunk - 1) / chunk));
    EXPECT_EQ(pairs, expected) << "a window of " << window;
  }
}

TEST(AttentionOfRanks, TheRingHoldsNoWholeSequence) {
  constexpr std::int64_t rows = 256;
  constexpr std::uint64_t heads = rows * 4 * 16 * 2;  // of a rank, in bf16
  std::array<std::uint64_t, 2> forward{}, both{};
  for (const std::size_t more : {0, 1}) {
    const int ranks = more ? 8 : 4;
    on_grid({1, ranks}, ContextMethod::ring, [&](Cpu& cpu, const Layout& layout) {
      const RankPass pass(cpu, layout, {1, ranks * rows, 4, 4, 16}, DType::bf16);
      if (layout.context_rank() == 0) forward[more] = pass.forward_peak, both[more] = pass.peak;
    });
  }
  // However long sequences are, a rank holds what its own rows take: 2 blocks of keys and values, and
  // backward 2 of their gradients in fp32.
  EXPECT_EQ(forward[0], forward[1]);
  EXPECT_EQ(both[0], both[1]);
  EXPECT_LT(forward[1], 8 * 2 * heads) << "all keys and values";
  EXPECT_LT(both[1], 8 * (2 + 4) * heads) << "all keys and values, and their gradients";
  EXPECT_LT(both[1], 28 * heads);
}

/// Runs `body` on each rank, of which the last does not come, and expects all others to fail within a few
/// deadlines.
void expect_all_fail(ContextMethod method, const std::function<void(int rank)>& last) {
  std::vector<std::string> errors(3);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(comm::run_local(3, {.timeout_seconds = 1},
                               [&](comm::Communicator& group) {
                                 Cpu cpu(1);
                                 const Layout layout{.context = &group, .context_method = method};
                                 try {
                                   if (group.rank() == 2) return last(2);
                                   const RankPass pass(cpu, layout, {1, 12, 3, 3, 4}, DType::f32);
                                 } catch (const Error& error) {
                                   errors[static_cast<std::size_t>(group.rank())] = error.what();
                                   EXPECT_EQ(error.kind(), ErrorKind::comm) << error.what();
                                   throw;
                                 }
                               }),
               Error);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  for (int rank = 0; rank < 2; ++rank) EXPECT_NE(errors[static_cast<std::size_t>(rank)], "") << rank;
  EXPECT_NE((errors[0] + errors[1]).find("rank 2"), std::string::npos) << errors[0] << "\n" << errors[1];
}

TEST(AttentionOfRanks, ARankThatIsLateOrGoneIsAnErrorOnAll) {
  for (const ContextMethod method : {ContextMethod::ring, ContextMethod::ulysses}) {
    expect_all_fail(method, [](int) {});  // leaves
    expect_all_fail(method, [](int) { std::this_thread::sleep_for(std::chrono::seconds(3)); });
  }
}

TEST(AttentionOfRanks, SaysWhatWouldDo) {
  on_grid({1, 2}, ContextMethod::ulysses, [&](Cpu& cpu, const Layout& layout) {
    expect_error(ErrorKind::config, "2 context ranks cannot share 3 key-value heads", [&] {
      const RankPass pass(cpu, layout, {1, 4, 3, 3, 2}, DType::f32);
    });
  });
  on_grid({1, 2}, ContextMethod::ring, [&](Cpu& cpu, const Layout& layout) {
    autograd::Tape tape(*cpu.kernels);
    expect_error(ErrorKind::usage, "two chunks of every sequence, which 3 tokens are not", [&] {
      attention(tape.input(cpu.normal({1, 3, 12}, 1)), {.heads = 2, .kv_heads = 2, .key = {}}, layout);
    });
  });
  const auto refuses = [](int ranks, int heads, int kv_heads, const char* text) {
    const auto group = comm::make_dry_world(0, ranks);
    expect_error(ErrorKind::config, text, [&] {
      rank_heads({.heads = heads, .kv_heads = kv_heads, .key = {}}, {.tensor = group.get()});
    });
  };
  refuses(
      4, 6, 2,
      "4 tensor ranks cannot share 6 heads with 2 key-value heads evenly: parallel.tensor may be 1, 2, 6");
  refuses(3, 4, 2, "may be 1, 2, 4");
  refuses(8, 4, 4, "may be 1, 2, 4");
}

}  // namespace
}  // namespace sherd::parallel

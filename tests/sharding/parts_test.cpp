// A model in parts, which passes of their own go through in the orders of schedules: losses and sums of
// gradients have the bits of one uncut pass after the other.
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "tests/sharding/tower.h"

namespace sherd::test {
namespace {

using autograd::WeightGradients;
using sharding::Chunk;
using sharding::Pass;

constexpr int cut_micro_batches = 3;

/// Passes through the chunks of a model on one rank, between which values and gradients are handed on.
class Cut {
 public:
  Cut(Tower& model, sharding::ShardedModel& sharded, Cpu& cpu, int rank, std::vector<Chunk> chunks)
      : model_(model), cpu_(cpu), rank_(rank), chunks_(std::move(chunks)) {
    for (std::size_t i = 0; i < cut_micro_batches * chunks_.size(); ++i)
      passes_.push_back(std::make_unique<Pass>(sharded));
    values_.resize(passes_.size());
  }

  int chunks() const { return static_cast<int>(chunks_.size()); }
  void forward(int micro, int chunk) {
    const Chunk& parts = chunks_[static_cast<std::size_t>(chunk)];
    Pass& pass = this->pass(micro, chunk);
    pass.begin(parts, micro + 1 == cut_micro_batches);
    pass.tape().random = {5, static_cast<std::uint64_t>(micro)};
    Value& value = this->value(micro, chunk);
    value.in = chunk > 0 ? pass.tape().variable(this->value(micro, chunk - 1).out.value()) : nn::Var();
    const tensor::Batch batch = batch_of(cpu_, rank_, micro);
    value.out = parts == Chunk{0, model_.parts()}
                    ? model_(pass.tape(), batch)
                    : model_.run(pass.tape(), parts.begin, parts.end, value.in, batch);
    if (chunk + 1 == chunks()) losses_.push_back(bytes_of(value.out.value()));
  }
  void backward(int micro, int chunk, WeightGradients when = WeightGradients::now) {
    Pass& pass = this->pass(micro, chunk);
    const nn::Var& out = value(micro, chunk).out;
    if (chunk + 1 == chunks())
      pass.begin_backward(out, 1, when);
    else
      pass.begin_backward({{out, value(micro, chunk + 1).in.grad()}}, when);
    while (pass.continue_backward()) {
    }
    if (when == WeightGradients::now) pass.end();
  }
  void weight_gradients(int micro, int chunk) {
    while (pass(micro, chunk).continue_weight_gradients()) {
    }
    pass(micro, chunk).end();
  }
  std::vector<std::vector<std::byte>> take_losses() { return std::exchange(losses_, {}); }

 private:
  struct Value {
    nn::Var in, out;
  };
  std::size_t index(int micro, int chunk) const { return static_cast<std::size_t>(micro * chunks() + chunk); }
  Pass& pass(int micro, int chunk) { return *passes_[index(micro, chunk)]; }
  Value& value(int micro, int chunk) { return values_[index(micro, chunk)]; }

  Tower& model_;
  Cpu& cpu_;
  int rank_;
  std::vector<Chunk> chunks_;
  std::vector<std::unique_ptr<Pass>> passes_;
  std::vector<Value> values_;
  std::vector<std::vector<std::byte>> losses_;
};

using Order = void (*)(Cut&);

/// One micro-batch after the other: accumulate, of one chunk or several.
void cut_one_by_one(Cut& cut) {
  for (int m = 0; m < cut_micro_batches; ++m) {
    for (int c = 0; c < cut.chunks(); ++c) cut.forward(m, c);
    for (int c = cut.chunks(); c-- > 0;) cut.backward(m, c);
  }
}

void gpipe(Cut& cut) {
  for (int m = 0; m < cut_micro_batches; ++m)
    for (int c = 0; c < cut.chunks(); ++c) cut.forward(m, c);
  for (int m = 0; m < cut_micro_batches; ++m)
    for (int c = cut.chunks(); c-- > 0;) cut.backward(m, c);
}

void layered(Cut& cut) {
  for (int c = 0; c < cut.chunks(); ++c)
    for (int m = 0; m < cut_micro_batches; ++m) cut.forward(m, c);
  for (int c = cut.chunks(); c-- > 0;)
    for (int m = 0; m < cut_micro_batches; ++m) cut.backward(m, c);
}

/// As interleaved 1F1B mixes the chunks of a rank: a later chunk's backward between forwards of an earlier
/// one.
void interleaved(Cut& cut) {
  const int last = cut.chunks() - 1;
  for (int c = 0; c <= last; ++c) cut.forward(0, c);
  for (int m = 1; m < cut_micro_batches; ++m) {
    cut.forward(m, 0);
    cut.backward(m - 1, last);
    for (int c = 1; c <= last; ++c) {
      cut.forward(m, c);
      cut.backward(m - 1, last - c);
    }
  }
  for (int c = last; c >= 0; --c) cut.backward(cut_micro_batches - 1, c);
}

/// Weight gradients behind the next micro-batch's backward, the rest at the end.
void zero_bubble(Cut& cut) {
  const auto back = [&](int m) {
    for (int c = cut.chunks(); c-- > 0;) cut.backward(m, c, WeightGradients::later);
  };
  const auto weights = [&](int m) {
    for (int c = cut.chunks(); c-- > 0;) cut.weight_gradients(m, c);
  };
  for (int m = 0; m < cut_micro_batches; ++m) {
    for (int c = 0; c < cut.chunks(); ++c) cut.forward(m, c);
    back(m);
    if (m > 0) weights(m - 1);
  }
  weights(cut_micro_batches - 1);
}

struct PartsCase {
  int ranks, stage;
};
void PrintTo(const PartsCase& c, std::ostream* to) {
  *to << c.ranks << " ranks, stage " << c.stage;
}

/// Losses and this rank's gradients of two steps, of all ranks; `prefetched`: gathers ahead in the second.
Bits bits_of(const PartsCase& c, const std::vector<Chunk>& chunks, Order order, bool in_list = true,
             bool tied = false, std::int64_t* prefetched = nullptr) {
  std::vector<Bits> by_rank(static_cast<std::size_t>(c.ranks));
  comm::run_local(c.ranks, {.timeout_seconds = 20}, [&](comm::Communicator& world) {
    Cpu cpu(1);
    const auto model = std::make_shared<Tower>(tied);
    sharding::ShardedModel sharded(model, options_of(c.stage), {world, *cpu.kernels});
    Cut cut(*model, sharded, cpu, world.rank(), chunks);
    Bits& out = by_rank[static_cast<std::size_t>(world.rank())];
    for (int step = 0; step < 2; ++step) {
      sharded.residency_stats() = {};
      if (in_list) sharded.begin_list();
      order(cut);
      if (in_list) sharded.end_list();
      sharded.finish_gradients();
      for (auto& loss : cut.take_losses()) out.push_back(std::move(loss));
      EXPECT_EQ(sharded.gradients().take_complete().size(), sharded.trainable_segments().size());
      for (sharding::Segment* segment : sharded.trainable_segments())
        out.push_back(bytes_of(segment->own_gradients()));
      sharded.gradients().clear();
    }
    const sharding::ResidencyStats& stats = sharded.residency_stats();
    EXPECT_EQ(stats.trace_breaks, 0);
    if (c.stage == 3 && c.ranks > 1) {
      EXPECT_GT(stats.prefetched, 0) << "the second list follows the plan of the first";
    }
    EXPECT_EQ(stats.live, 0);
    if (prefetched && world.rank() == 0) *prefetched = stats.prefetched;
  });
  Bits out;
  for (Bits& rank : by_rank) out.insert(out.end(), rank.begin(), rank.end());
  return out;
}

/// Losses are told in the order of their forward, which is that of micro-batches in all orders.
class Parts : public ::testing::TestWithParam<PartsCase> {};

TEST_P(Parts, PassesThroughChunksHaveTheBitsOfUncutOnes) {
  const Bits expected = bits_of(GetParam(), {{0, 5}}, cut_one_by_one, false);
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(GetParam().ranks) * 2 * (cut_micro_batches + 5));
  const std::vector<Chunk> three = {{0, 2}, {2, 4}, {4, 5}}, all = {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}};
  EXPECT_TRUE(bits_of(GetParam(), {{0, 5}}, cut_one_by_one) == expected) << "a list of uncut passes";
  EXPECT_TRUE(bits_of(GetParam(), three, cut_one_by_one) == expected) << "accumulate, in gaps of a list";
  EXPECT_TRUE(bits_of(GetParam(), three, gpipe) == expected) << "gpipe";
  EXPECT_TRUE(bits_of(GetParam(), all, layered) == expected) << "layered";
  EXPECT_TRUE(bits_of(GetParam(), three, interleaved) == expected) << "interleaved";
  EXPECT_TRUE(bits_of(GetParam(), {{0, 3}, {3, 5}}, zero_bubble) == expected) << "zero bubble";
}

/// Both parts' gradients of a tied table are in its sum, in another order than uncut.
TEST_P(Parts, ATableThatTwoChunksUseHasTheSumOfBoth) {
  const Bits expected = bits_of(GetParam(), {{0, 5}}, cut_one_by_one, false, true);
  for (const Order order : {cut_one_by_one, layered, interleaved}) {
    const Bits got = bits_of(GetParam(), {{0, 2}, {2, 4}, {4, 5}}, order, true, true);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].size(), expected[i].size());
      const auto* a = reinterpret_cast<const float*>(got[i].data());
      const auto* b = reinterpret_cast<const float*>(expected[i].data());
      for (std::size_t k = 0; k < got[i].size() / sizeof(float); ++k) ASSERT_NEAR(a[k], b[k], 1e-5);
    }
  }
}

TEST(Lists, GatherAheadAcrossGapsBetweenPasses) {
  std::int64_t uncut = 0, in_gaps = 0;
  (void)bits_of({2, 3}, {{0, 5}}, cut_one_by_one, false, false, &uncut);
  (void)bits_of({2, 3}, {{0, 2}, {2, 4}, {4, 5}}, cut_one_by_one, true, false, &in_gaps);
  EXPECT_GT(uncut, 0);
  EXPECT_GE(in_gaps, uncut);
}

INSTANTIATE_TEST_SUITE_P(Stages, Parts,
                         ::testing::Values(PartsCase{1, 0}, PartsCase{1, 1}, PartsCase{1, 2}, PartsCase{1, 3},
                                           PartsCase{2, 0}, PartsCase{2, 1}, PartsCase{2, 2},
                                           PartsCase{2, 3}));

TEST(PartUnits, AreNamedByTheirModulesAndLendWhatIsTied) {
  comm::run_local(1, {}, [&](comm::Communicator& alone) {
    Cpu cpu(1);
    const auto model = std::make_shared<Tower>(true);
    sharding::ShardedModel sharded(model, {}, {alone, *cpu.kernels});
    std::vector<std::string> names;
    for (const auto& unit : sharded.units()) names.push_back(unit->name());
    EXPECT_EQ(names, (std::vector<std::string>{"in", "blocks.0", "blocks.1", "blocks.2", "out"}));
    EXPECT_EQ(sharded.units_of({4, 5}).size(), 2u) << "its bias, and the tied weight's unit";
    EXPECT_EQ(sharded.lowest_part(*sharded.units()[0]), 0u);
    EXPECT_EQ(sharded.lowest_part(*sharded.units()[4]), 4u);
    EXPECT_FALSE(model->scope()) << "nothing is left for a root";
    Pass pass(sharded);
    testing::expect_error(ErrorKind::usage, "which this rank does not have", [&] {
      pass.begin({4, 6}, true);
    });
  });
}

}  // namespace
}  // namespace sherd::test

// Several micro-batches under way at once, weight gradients that are put off, and a model cut in two: the
// sums of gradients have the bits of one micro-batch after the other.
#include "sharding/pass.h"

#include <gtest/gtest.h>

#include <cstring>

#include "autograd/ops.h"
#include "sharding/sharded_model.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/odd_models.h"

namespace sherd::test {
namespace {

using autograd::WeightGradients;
using sharding::Pass;
using tensor::Tensor;

constexpr int pass_micro_batches = 3;

tensor::Batch batch_with_ids(Cpu& cpu, int rank, int micro) {
  const auto seed = static_cast<std::uint64_t>(rank * 100 + micro);
  tensor::Batch out = {{"x", cpu.normal({4, 8}, seed, DType::f32)},
                       {"y", cpu.normal({4, 1}, seed + 50, DType::f32)},
                       {"ids", cpu.ids({4}, seed, 3)}};
  if (micro % 2 == 1) out["again"] = cpu.ids({4}, seed + 25, 3);
  return out;
}

/// Odd, and a table that no block holds: some micro-batches look into it once, others twice. Its gradient is
/// never put off.
class WithTable : public Odd {
 public:
  WithTable() : table_(add("table", std::make_shared<nn::Embedding>(3, 8))) {}

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    nn::Var rows = (*table_)(tape, batch.at("ids"));
    if (batch.contains("again")) rows = autograd::add(rows, (*table_)(tape, batch.at("again")));
    return autograd::add(Odd::forward(tape, batch), autograd::mean_squared_error(rows, batch.at("x")));
  }

 private:
  std::shared_ptr<nn::Embedding> table_;
};

struct PassCase {
  int ranks, stage;
  Recompute recompute = Recompute::none;
  Reduction reduction = Reduction::ordered;
  bool table = false;
};
void PrintTo(const PassCase& c, std::ostream* to) {
  *to << c.ranks << " ranks, stage " << c.stage << ", recompute " << static_cast<int>(c.recompute)
      << (c.table ? ", with a table" : "");
}

void back(Pass& pass) {
  while (pass.continue_backward()) {
  }
}
void weights(Pass& pass) {
  int blocks = 0;
  while (pass.continue_weight_gradients()) ++blocks;
  EXPECT_EQ(blocks, 4) << "three blocks and what is outside of them put theirs off";
}

/// Runs `schedule` on a new model, with a pass for each micro-batch; the bits of this rank's gradients.
using PassSchedule = std::function<void(nn::Model&, std::vector<std::unique_ptr<Pass>>&, Cpu&, int rank)>;
std::vector<std::vector<std::byte>> gradients_after(const PassCase& c, const PassSchedule& schedule) {
  std::vector<std::vector<std::vector<std::byte>>> by_rank(static_cast<std::size_t>(c.ranks));
  comm::run_local(c.ranks, {.timeout_seconds = 20}, [&](comm::Communicator& world) {
    Cpu cpu(1);
    const auto model = c.table ? std::make_shared<WithTable>() : std::make_shared<Odd>();
    sharding::ShardingOptions options;
    options.placements = sharding::make_placements(c.stage, DType::f32, DType::f32, DType::f32);
    options.seed = 3;
    options.reduce_bucket = 64;
    options.reduction = c.reduction;
    options.residency = {1000, 10'000, 0};
    sharding::ShardedModel sharded(model, options, {world, *cpu.kernels});
    std::vector<std::unique_ptr<Pass>> passes;
    for (int i = 0; i < pass_micro_batches; ++i) {
      passes.push_back(std::make_unique<Pass>(sharded));
      passes.back()->tape().recompute = c.recompute;
    }
    for (int step = 0; step < 2; ++step) {  // the second follows a plan
      sharded.residency_stats() = {};
      schedule(*model, passes, cpu, world.rank());
      sharded.finish_gradients();
      for (sharding::Segment* segment : sharded.trainable_segments())
        by_rank[static_cast<std::size_t>(world.rank())].push_back(bytes_of(segment->gradients().tensor()));
      sharded.gradients().clear();
    }
    const sharding::ResidencyStats& stats = sharded.residency_stats();
    EXPECT_EQ(stats.trace_breaks, 0);
    if (c.stage == 3 && c.ranks > 1) {
      EXPECT_GT(2 * stats.prefetched, stats.gathers) << "all passes follow the plan";
    }
  });
  std::vector<std::vector<std::byte>> out;
  for (const auto& rank : by_rank) out.insert(out.end(), rank.begin(), rank.end());
  return out;
}

nn::Var forward(nn::Model& model, Pass& pass, Cpu& cpu, int rank, int micro) {
  pass.begin({}, micro + 1 == pass_micro_batches);
  return model(pass.tape(), batch_with_ids(cpu, rank, micro));
}

void passes_one_by_one(nn::Model& model, std::vector<std::unique_ptr<Pass>>& passes, Cpu& cpu, int rank) {
  for (int i = 0; i < pass_micro_batches; ++i) {
    Pass& pass = *passes[static_cast<std::size_t>(i)];
    pass.begin_backward(forward(model, pass, cpu, rank, i), 1);
    back(pass);
    pass.end();
  }
}

/// All forward, then all backward in ascending order: GPipe.
void all_forward_first(nn::Model& model, std::vector<std::unique_ptr<Pass>>& passes, Cpu& cpu, int rank) {
  std::vector<nn::Var> losses;
  for (int i = 0; i < pass_micro_batches; ++i)
    losses.push_back(forward(model, *passes[static_cast<std::size_t>(i)], cpu, rank, i));
  for (std::size_t i = 0; i < pass_micro_batches; ++i) {
    passes[i]->begin_backward(losses[i], 1);
    back(*passes[i]);
    passes[i]->end();
  }
}

/// Weight gradients after each backward.
void weights_later(nn::Model& model, std::vector<std::unique_ptr<Pass>>& passes, Cpu& cpu, int rank) {
  for (int i = 0; i < pass_micro_batches; ++i) {
    Pass& pass = *passes[static_cast<std::size_t>(i)];
    pass.begin_backward(forward(model, pass, cpu, rank, i), 1, WeightGradients::later);
    back(pass);
    weights(pass);
    pass.end();
  }
}

/// Weight gradients when two micro-batches have been through backward: as a zero-bubble schedule does.
void weights_last(nn::Model& model, std::vector<std::unique_ptr<Pass>>& passes, Cpu& cpu, int rank) {
  std::vector<nn::Var> losses;
  for (int i = 0; i < pass_micro_batches; ++i)
    losses.push_back(forward(model, *passes[static_cast<std::size_t>(i)], cpu, rank, i));
  for (std::size_t i = 0; i < pass_micro_batches; ++i) {
    passes[i]->begin_backward(losses[i], 1, WeightGradients::later);
    back(*passes[i]);
  }
  for (const auto& pass : passes) {
    weights(*pass);
    pass->end();
  }
}

class Passes : public ::testing::TestWithParam<PassCase> {};

TEST_P(Passes, ManyUnderWayGiveTheBitsOfOneByOne) {
  const auto expected = gradients_after(GetParam(), passes_one_by_one);
  ASSERT_FALSE(expected.empty());
  bool any = false;
  for (const auto& gradients : expected)
    for (const std::byte b : gradients) any = any || b != std::byte{};
  EXPECT_TRUE(any);
  EXPECT_TRUE(gradients_after(GetParam(), all_forward_first) == expected) << "all forward first";
  EXPECT_TRUE(gradients_after(GetParam(), weights_later) == expected) << "weight gradients later";
  EXPECT_TRUE(gradients_after(GetParam(), weights_last) == expected) << "weight gradients last";
}

INSTANTIATE_TEST_SUITE_P(Stages, Passes,
                         ::testing::Values(PassCase{1, 0}, PassCase{1, 2}, PassCase{1, 3, Recompute::full},
                                           PassCase{2, 0}, PassCase{2, 1}, PassCase{2, 2}, PassCase{2, 3},
                                           PassCase{2, 3, Recompute::full},
                                           PassCase{2, 3, Recompute::selective}, PassCase{3, 3},
                                           PassCase{1, 2, Recompute::none, Reduction::native},
                                           PassCase{1, 2, Recompute::none, Reduction::ordered, true},
                                           PassCase{2, 2, Recompute::none, Reduction::ordered, true}));

/// Two layers, each on a tape of its own, as two stages of a pipeline on one rank.
TEST(Passes, AModelCutInTwoHasTheGradientsOfOneTape) {
  comm::run_local(2, {.timeout_seconds = 20}, [&](comm::Communicator& world) {
    Cpu cpu(1);
    const auto model = std::make_shared<Odd>();
    sharding::ShardingOptions options;
    options.placements = sharding::make_placements(3, DType::f32, DType::f32, DType::f32);
    sharding::ShardedModel sharded(model, options, {world, *cpu.kernels});
    const auto run = [&](nn::Tape& tape, int layer, const nn::Var& x) {
      const auto& children = model->children();
      return autograd::tanh(
          dynamic_cast<nn::Linear&>(*children[static_cast<std::size_t>(layer)].second)(tape, x));
    };
    const auto gradients = [&] {
      std::vector<std::vector<std::byte>> out;
      for (sharding::Segment* segment : sharded.trainable_segments())
        out.push_back(bytes_of(segment->own_gradients()));
      sharded.gradients().clear();
      return out;
    };
    const Tensor x = cpu.normal({4, 8}, 1, DType::f32), y = cpu.normal({4, 8}, 2, DType::f32);
    Pass whole(sharded);
    whole.begin({}, true);
    whole.begin_backward(
        autograd::mean_squared_error(run(whole.tape(), 1, run(whole.tape(), 0, whole.tape().input(x))), y),
        2);
    back(whole);
    whole.end();
    sharded.finish_gradients();
    const auto expected = gradients();

    Pass first(sharded), second(sharded);
    first.begin({}, true);
    second.begin({}, true);
    const nn::Var sent = run(first.tape(), 0, first.tape().input(x));
    const nn::Var received = second.tape().variable(sent.value());
    second.begin_backward(autograd::mean_squared_error(run(second.tape(), 1, received), y), 2);
    back(second);
    second.end();
    first.begin_backward({{sent, received.grad()}});
    back(first);
    first.end();
    sharded.finish_gradients();
    EXPECT_TRUE(gradients() == expected);

    first.begin({}, true);
    const nn::Var out = run(first.tape(), 0, first.tape().input(x));
    sherd::testing::expect_error(ErrorKind::usage, "a gradient of its output's shape and dtype: fp32 [4, 8]",
                                 [&] {
                                   first.begin_backward({{out, cpu.normal({8, 4}, 1, DType::f32)}});
                                 });
    first.begin_backward({{out, y}});
    sherd::testing::expect_error(ErrorKind::usage, "has begun on this forward pass already", [&] {
      first.begin_backward({{out, y}});
    });
    sharded.abandon_passes();
  });
}

TEST(Passes, GradientsThatAreCompleteOutOfTurnAreRefused) {
  comm::run_local(1, {}, [&](comm::Communicator& alone) {
    Cpu cpu(1);
    const auto model = std::make_shared<Odd>();
    sharding::ShardingOptions options;
    options.placements = sharding::make_placements(2, DType::f32, DType::f32, DType::f32);
    sharding::ShardedModel sharded(model, options, {alone, *cpu.kernels});
    Pass first(sharded), second(sharded);
    std::vector<nn::Var> losses;
    for (Pass* pass : {&first, &second}) {
      pass->begin({}, pass == &second);
      losses.push_back((*model)(pass->tape(), batch_with_ids(cpu, 0, 0)));
    }
    first.begin_backward(losses[0], 1, WeightGradients::later);
    back(first);
    second.begin_backward(losses[1], 1, WeightGradients::later);
    back(second);
    sherd::testing::expect_error(ErrorKind::usage, "complete out of turn", [&] { weights(second); });
    sharded.abandon_passes();
  });
}

TEST(Passes, OnlyTheirTapesRunTheModel) {
  comm::run_local(1, {}, [&](comm::Communicator& alone) {
    Cpu cpu(1);
    const auto model = std::make_shared<Odd>();
    sharding::ShardedModel sharded(model, {}, {alone, *cpu.kernels});
    autograd::Tape foreign(*cpu.kernels);
    sherd::testing::expect_error(ErrorKind::usage, "run it on the tape of one of its passes",
                                 [&] { (*model)(foreign, batch_with_ids(cpu, 0, 0)); });
    Pass pass(sharded);
    sherd::testing::expect_error(ErrorKind::usage, "was run outside of a pass and is recorded",
                                 [&] { (*model)(pass.tape(), batch_with_ids(cpu, 0, 0)); });
    double loss = 0;
    pass.evaluate([&](autograd::Tape& tape) {
      loss = tensor::scalar_value((*model)(tape, batch_with_ids(cpu, 0, 0)).value());
    });
    EXPECT_GT(loss, 0);
  });
}

}  // namespace
}  // namespace sherd::test

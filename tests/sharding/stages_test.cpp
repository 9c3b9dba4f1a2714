// Parts of a model on ranks of their own store nothing of others, and their copies of what they share find
// the sum that a formula gives.
#include <gtest/gtest.h>

#include <array>

#include "support/expect_error.h"
#include "tests/sharding/tower.h"

namespace sherd::test {
namespace {

using sharding::Pass;
using sharding::RankGroups;
using tensor::Tensor;

/// A table that both parts use: y = (x·Wᵀ)·Wᵀ.
class Twice : public nn::LayeredModel {
 public:
  Twice() {
    first_ = add("first", std::make_shared<nn::Linear>(8, 8, nn::LinearOptions{.bias = false}));
    second_ = add("second", std::make_shared<nn::Linear>(
                                8, 8, nn::LinearOptions{.bias = false, .tied = first_->weight()}));
    append_part({first_});
    append_part({second_});
  }
  const nn::ParameterPtr& weight() const { return first_->weight(); }

 protected:
  nn::Var forward_part(nn::Tape& tape, std::size_t part, const nn::Var& x,
                       const tensor::Batch& batch) override {
    if (part == 0) return (*first_)(tape, tape.input(batch.at("x")));
    return autograd::mean_squared_error((*second_)(tape, x), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> first_, second_;
};

using Matrix = std::vector<double>;

/// Adds one micro-batch's part to `sum`, the gradient of W.
void add_gradient(Cpu& cpu, const Matrix& w, const tensor::Batch& batch, Matrix& sum) {
  const Matrix x = cpu.values(batch.at("x")), y = cpu.values(batch.at("y"));
  const std::size_t rows = x.size() / 8;
  for (std::size_t row = 0; row < rows; ++row) {
    std::array<double, 8> h{}, r{}, back{};
    for (std::size_t i = 0; i < 8; ++i)
      for (std::size_t j = 0; j < 8; ++j) h[i] += w[i * 8 + j] * x[row * 8 + j];
    for (std::size_t i = 0; i < 8; ++i) {
      double out = 0;
      for (std::size_t j = 0; j < 8; ++j) out += w[i * 8 + j] * h[j];
      r[i] = 2 * (out - y[row * 8 + i]) / static_cast<double>(y.size());
      for (std::size_t j = 0; j < 8; ++j) back[j] += r[i] * w[i * 8 + j];
    }
    for (std::size_t i = 0; i < 8; ++i)
      for (std::size_t j = 0; j < 8; ++j) sum[i * 8 + j] += r[i] * h[j] + back[i] * x[row * 8 + j];
  }
}

struct Layout {
  int data, stage, shard;  ///< data ranks of each stage, of which `shard` share states
  int micro_batches;
  Reduction reduction = Reduction::ordered;
  bool overlap = false;
};
void PrintTo(const Layout& l, std::ostream* to) {
  *to << "data " << l.data << ", shard " << l.shard << ", stage " << l.stage << ", " << l.micro_batches
      << " micro-batches" << (l.reduction == Reduction::native ? ", native" : "");
}

/// Rank = pipeline stage · data + data rank.
struct StageGroups {
  StageGroups(comm::Communicator& world, const Layout& c) {
    const int ranks = 2 * c.data, replicas = c.data / c.shard;
    std::vector<std::vector<int>> shards, same, ends;
    for (int rank = 0; rank < ranks; rank += c.shard) {
      shards.emplace_back();
      for (int i = 0; i < c.shard; ++i) shards.back().push_back(rank + i);
    }
    for (int i = 0; i < c.shard; ++i) {
      same.emplace_back();
      for (int block = 0; block < 2 * replicas; ++block) same.back().push_back(block * c.shard + i);
    }
    for (int i = 0; i < c.data; ++i) ends.push_back({i, c.data + i});
    shard = world.part(shards), replica = world.part(same), pipeline = world.part(ends);
  }
  std::unique_ptr<comm::Communicator> shard, replica, pipeline;
};

/// A step of one stage. The second ends each pass before it hands its gradient on: it must not wait there for
/// the first.
void run_step(Twice& model, sharding::ShardedModel& sharded, Pass& pass, Cpu& cpu,
              comm::Communicator& pipeline, int data, int micro_batches) {
  sharded.begin_list();
  for (int micro = 0; micro < micro_batches; ++micro) {
    const tensor::Batch batch = batch_of(cpu, data, micro);
    const Tensor travelling = Tensor::empty(*cpu.device, {4, 8}, DType::f32);
    pass.begin(sharded.options().parts[0], micro + 1 == micro_batches);
    nn::Var in;
    if (pipeline.rank() == 0) {
      const nn::Var out = model.run(pass.tape(), 0, 1, {}, batch);
      pipeline.send(out.value(), 1, {.async = true});
      pipeline.receive(travelling, 1).wait();
      pass.begin_backward({{out, travelling}});
    } else {
      pipeline.receive(travelling, 0).wait();
      in = pass.tape().variable(travelling);
      pass.begin_backward(model.run(pass.tape(), 1, 2, in, batch), 1);
    }
    while (pass.continue_backward()) {
    }
    pass.end();
    if (in.defined()) pipeline.send(in.grad(), 0).wait();
  }
  sharded.end_list();
  sharded.finish_gradients();
}

class TiedStages : public ::testing::TestWithParam<Layout> {};

TEST_P(TiedStages, AgreeOnTheSumOfAFormula) {
  const Layout c = GetParam();
  const int ranks = 2 * c.data;
  std::vector<Bits> gradients(static_cast<std::size_t>(ranks));
  comm::run_local(ranks, {.timeout_seconds = 20}, [&](comm::Communicator& world) {
    const int stage = world.rank() / c.data, data = world.rank() % c.data;
    const StageGroups groups(world, c);
    Cpu cpu(1);
    const auto model = std::make_shared<Twice>();
    sharding::ShardingOptions options = options_of(c.stage);
    options.reduction = c.reduction;
    options.overlap = c.overlap;
    const auto part = static_cast<std::size_t>(stage);
    options.parts = {{part, part + 1}};
    sharding::StateSources sources{*groups.shard, *cpu.kernels};
    sources.model_ranks = &world;
    sources.groups_of = [&](const autograd::Parameter&) {
      RankGroups of_tied(*groups.shard, groups.replica.get());
      of_tied.over_stages = true;
      return of_tied;
    };
    sharding::ShardedModel sharded(model, options, sources);
    Matrix w;
    {
      const auto lease = sharded.gather(*model->weight());
      w = cpu.values(model->weight()->value);
    }
    Pass pass(sharded);
    for (int step = 0; step < 2; ++step) {
      run_step(*model, sharded, pass, cpu, *groups.pipeline, data, c.micro_batches);
      Matrix sum(64);
      for (int micro = 0; micro < c.micro_batches; ++micro)
        for (int rank = 0; rank < c.data; ++rank) add_gradient(cpu, w, batch_of(cpu, rank, micro), sum);
      double squares = 0;
      for (const double element : sum) squares += element * element;
      ASSERT_GT(squares, 1e-3);
      EXPECT_NEAR(sharded.gradients().sum_of_squares().value(), squares, 1e-5 * squares) << "counted once";
      ASSERT_EQ(sharded.trainable_segments().size(), 1u);
      const sharding::Segment& segment = *sharded.trainable_segments()[0];
      const Tensor own = segment.own_gradients();
      for (const auto& piece : segment.layout().pieces(segment.own_begin(), segment.own_end()))
        for (std::int64_t i = 0; i < piece.count; ++i)
          ASSERT_NEAR(own.data<float>()[piece.flat_begin - segment.own_begin() + i],
                      sum[static_cast<std::size_t>(piece.parameter_begin + i)], 1e-5);
      gradients[static_cast<std::size_t>(world.rank())] = {bytes_of(own)};
      EXPECT_EQ(sharded.gradients().take_complete().size(), 1u);
      sharded.gradients().clear();
    }
  });
  for (int rank = c.shard; rank < ranks; ++rank)
    EXPECT_TRUE(gradients[static_cast<std::size_t>(rank)] ==
                gradients[static_cast<std::size_t>(rank % c.shard)])
        << "all copies have the same bits";
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, TiedStages,
    ::testing::Values(Layout{1, 0, 1, 1}, Layout{1, 0, 1, 3}, Layout{1, 1, 1, 2}, Layout{1, 2, 1, 1},
                      Layout{1, 2, 1, 3}, Layout{1, 3, 1, 2}, Layout{2, 0, 2, 2}, Layout{2, 2, 2, 3},
                      Layout{2, 3, 2, 1}, Layout{2, 3, 1, 2}, Layout{4, 3, 2, 2},
                      Layout{2, 1, 2, 2, Reduction::native}, Layout{2, 0, 2, 2, Reduction::ordered, true},
                      Layout{2, 3, 1, 2, Reduction::ordered, true}, Layout{1, 2, 1, 2, Reduction::native}));

/// A rank of the last of two stages, next to a first one that is not there.
TEST(StagesStore, OnlyWhatTheirPartsUse) {
  comm::run_local(1, {}, [&](comm::Communicator& alone) {
    Cpu cpu(1);
    const auto used = [&](device::Category category) {
      return cpu.device->ledger().current(device::Tier::device, category);
    };
    const auto model = std::make_shared<Tower>(true);
    sharding::ShardingOptions options = options_of(1);
    options.parts = {{3, 5}};
    model->freeze();
    for (const auto& parameter : {model->in().weight(), model->out().bias()}) parameter->trainable = true;
    const auto before = used(device::Category::parameters);
    {
      sharding::ShardedModel sharded(model, options, {alone, *cpu.kernels});
      // The last block, the head's bias and the tied table; of gradients, the last two.
      EXPECT_EQ(sharded.parameter_count(), 64 + 8 + 8 + 64);
      EXPECT_EQ(used(device::Category::parameters) - before, (64 + 8 + 8 + 64) * sizeof(float));
      EXPECT_EQ(used(device::Category::gradients), (64 + 8) * sizeof(float));
      EXPECT_EQ(used(device::Category::padding), 3 * (64 - 8) * sizeof(float));
      EXPECT_EQ(model->in().bias()->name, "in.bias");
      EXPECT_EQ(model->in().bias()->shape, (tensor::Shape{8}));
      EXPECT_FALSE(model->in().bias()->value.defined());
      testing::expect_error(ErrorKind::usage, "'in.bias' is not on this rank",
                            [&] { (void)sharded.gather(*model->in().bias()); });
      const auto lease = sharded.gather(*model->in().weight());
      Pass pass(sharded);
      testing::expect_error(ErrorKind::usage, "which this rank does not have", [&] {
        pass.begin({0, 5}, true);
      });
    }
    EXPECT_EQ(used(device::Category::parameters), before);
  });
}

}  // namespace
}  // namespace sherd::test

// A model in parts, which passes of their own go through in the orders of schedules: losses and sums of
// gradients have the bits of one uncut pass after the other. Parts on ranks of their own store nothing of
// others, and their copies of what they share find the sum that a formula gives.
#include <gtest/gtest.h>

#include <array>

#include "autograd/ops.h"
#include "nn/layers.h"
#include "nn/sequential_model.h"
#include "sharding/sharded_model.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"

namespace sherd::test {
namespace {

using autograd::WeightGradients;
using sharding::Chunk;
using sharding::Pass;
using sharding::RankGroups;
using tensor::Tensor;

constexpr int micro_batches = 3;

/// Embeddings' and head's parts are no blocks, those between are. With dropout in the first part and a block.
class Tower : public nn::LayeredModel {
 public:
  explicit Tower(bool tied) {
    in_ = add("in", std::make_shared<nn::Linear>(8, 8));
    in_dropout_ = add("in_dropout", std::make_shared<nn::Dropout>(0.25f));
    append_part({in_, in_dropout_});
    blocks_ = add("blocks", std::make_shared<nn::LayerList>());
    for (int i = 0; i < 3; ++i) append_part({blocks_->append(std::make_shared<nn::Linear>(8, 8))});
    out_dropout_ = add("out_dropout", std::make_shared<nn::Dropout>(0.25f));
    out_ = add("out",
               std::make_shared<nn::Linear>(8, 8, nn::LinearOptions{.tied = tied ? in_->weight() : nullptr}));
    append_part({out_dropout_, out_});
  }
  const nn::Linear& in() const { return *in_; }
  const nn::Linear& out() const { return *out_; }

 protected:
  nn::Var forward_part(nn::Tape& tape, std::size_t part, const nn::Var& x,
                       const tensor::Batch& batch) override {
    if (part == 0) return (*in_dropout_)(tape, (*in_)(tape, tape.input(batch.at("x"))));
    if (part + 1 < parts()) return autograd::tanh((*blocks_)[part - 1](tape, x));
    return autograd::mean_squared_error((*out_)(tape, (*out_dropout_)(tape, x)), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> in_, out_;
  std::shared_ptr<nn::Dropout> in_dropout_, out_dropout_;
  std::shared_ptr<nn::LayerList> blocks_;
};

tensor::Batch batch_of(Cpu& cpu, int rank, int micro) {
  const auto seed = static_cast<std::uint64_t>(rank * 100 + micro);
  return {{"x", cpu.normal({4, 8}, seed, DType::f32)}, {"y", cpu.normal({4, 8}, seed + 50, DType::f32)}};
}

/// Passes through the chunks of a model on one rank, between which values and gradients are handed on.
class Cut {
 public:
  Cut(Tower& model, sharding::ShardedModel& sharded, Cpu& cpu, int rank, std::vector<Chunk> chunks)
      : model_(model), cpu_(cpu), rank_(rank), chunks_(std::move(chunks)) {
    for (std::size_t i = 0; i < micro_batches * chunks_.size(); ++i)
      passes_.push_back(std::make_unique<Pass>(sharded));
    values_.resize(passes_.size());
  }

  int chunks() const { return static_cast<int>(chunks_.size()); }
  void forward(int micro, int chunk) {
    const Chunk& parts = chunks_[static_cast<std::size_t>(chunk)];
    Pass& pass = this->pass(micro, chunk);
    pass.begin(parts, micro + 1 == micro_batches);
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
void one_by_one(Cut& cut) {
  for (int m = 0; m < micro_batches; ++m) {
    for (int c = 0; c < cut.chunks(); ++c) cut.forward(m, c);
    for (int c = cut.chunks(); c-- > 0;) cut.backward(m, c);
  }
}

void gpipe(Cut& cut) {
  for (int m = 0; m < micro_batches; ++m)
    for (int c = 0; c < cut.chunks(); ++c) cut.forward(m, c);
  for (int m = 0; m < micro_batches; ++m)
    for (int c = cut.chunks(); c-- > 0;) cut.backward(m, c);
}

void layered(Cut& cut) {
  for (int c = 0; c < cut.chunks(); ++c)
    for (int m = 0; m < micro_batches; ++m) cut.forward(m, c);
  for (int c = cut.chunks(); c-- > 0;)
    for (int m = 0; m < micro_batches; ++m) cut.backward(m, c);
}

/// As interleaved 1F1B mixes the chunks of a rank: a later chunk's backward between forwards of an earlier
/// one.
void interleaved(Cut& cut) {
  const int last = cut.chunks() - 1;
  for (int c = 0; c <= last; ++c) cut.forward(0, c);
  for (int m = 1; m < micro_batches; ++m) {
    cut.forward(m, 0);
    cut.backward(m - 1, last);
    for (int c = 1; c <= last; ++c) {
      cut.forward(m, c);
      cut.backward(m - 1, last - c);
    }
  }
  for (int c = last; c >= 0; --c) cut.backward(micro_batches - 1, c);
}

/// Weight gradients behind the next micro-batch's backward, the rest at the end.
void zero_bubble(Cut& cut) {
  const auto back = [&](int m) {
    for (int c = cut.chunks(); c-- > 0;) cut.backward(m, c, WeightGradients::later);
  };
  const auto weights = [&](int m) {
    for (int c = cut.chunks(); c-- > 0;) cut.weight_gradients(m, c);
  };
  for (int m = 0; m < micro_batches; ++m) {
    for (int c = 0; c < cut.chunks(); ++c) cut.forward(m, c);
    back(m);
    if (m > 0) weights(m - 1);
  }
  weights(micro_batches - 1);
}

struct Case {
  int ranks, stage;
};
void PrintTo(const Case& c, std::ostream* to) {
  *to << c.ranks << " ranks, stage " << c.stage;
}

sharding::ShardingOptions options_of(int stage) {
  sharding::ShardingOptions options;
  options.placements = sharding::make_placements(stage, DType::f32, DType::f32, DType::f32);
  options.seed = 3;
  options.reduce_bucket = 64;
  options.residency = {1000, 10'000, 0};
  return options;
}

using Bits = std::vector<std::vector<std::byte>>;

/// Losses and this rank's gradients of two steps, of all ranks; `prefetched`: gathers ahead in the second.
Bits bits_of(const Case& c, const std::vector<Chunk>& chunks, Order order, bool in_list = true,
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
class Parts : public ::testing::TestWithParam<Case> {};

TEST_P(Parts, PassesThroughChunksHaveTheBitsOfUncutOnes) {
  const Bits expected = bits_of(GetParam(), {{0, 5}}, one_by_one, false);
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(GetParam().ranks) * 2 * (micro_batches + 5));
  const std::vector<Chunk> three = {{0, 2}, {2, 4}, {4, 5}}, all = {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}};
  EXPECT_TRUE(bits_of(GetParam(), {{0, 5}}, one_by_one) == expected) << "a list of uncut passes";
  EXPECT_TRUE(bits_of(GetParam(), three, one_by_one) == expected) << "accumulate, in gaps of a list";
  EXPECT_TRUE(bits_of(GetParam(), three, gpipe) == expected) << "gpipe";
  EXPECT_TRUE(bits_of(GetParam(), all, layered) == expected) << "layered";
  EXPECT_TRUE(bits_of(GetParam(), three, interleaved) == expected) << "interleaved";
  EXPECT_TRUE(bits_of(GetParam(), {{0, 3}, {3, 5}}, zero_bubble) == expected) << "zero bubble";
}

/// Both parts' gradients of a tied table are in its sum, in another order than uncut.
TEST_P(Parts, ATableThatTwoChunksUseHasTheSumOfBoth) {
  const Bits expected = bits_of(GetParam(), {{0, 5}}, one_by_one, false, true);
  for (const Order order : {one_by_one, layered, interleaved}) {
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
  (void)bits_of({2, 3}, {{0, 5}}, one_by_one, false, false, &uncut);
  (void)bits_of({2, 3}, {{0, 2}, {2, 4}, {4, 5}}, one_by_one, true, false, &in_gaps);
  EXPECT_GT(uncut, 0);
  EXPECT_GE(in_gaps, uncut);
}

INSTANTIATE_TEST_SUITE_P(Stages, Parts,
                         ::testing::Values(Case{1, 0}, Case{1, 1}, Case{1, 2}, Case{1, 3}, Case{2, 0},
                                           Case{2, 1}, Case{2, 2}, Case{2, 3}));

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

// ---- stages on ranks of their own ----

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

/// What one micro-batch adds to the gradient of W.
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
  comm::Reduction reduction = comm::Reduction::ordered;
  bool overlap = false;
};
void PrintTo(const Layout& l, std::ostream* to) {
  *to << "data " << l.data << ", shard " << l.shard << ", stage " << l.stage << ", " << l.micro_batches
      << " micro-batches" << (l.reduction == comm::Reduction::native ? ", native" : "");
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

INSTANTIATE_TEST_SUITE_P(Layouts, TiedStages,
                         ::testing::Values(Layout{1, 0, 1, 1}, Layout{1, 0, 1, 3}, Layout{1, 1, 1, 2},
                                           Layout{1, 2, 1, 1}, Layout{1, 2, 1, 3}, Layout{1, 3, 1, 2},
                                           Layout{2, 0, 2, 2}, Layout{2, 2, 2, 3}, Layout{2, 3, 2, 1},
                                           Layout{2, 3, 1, 2}, Layout{4, 3, 2, 2},
                                           Layout{2, 1, 2, 2, comm::Reduction::native},
                                           Layout{2, 0, 2, 2, comm::Reduction::ordered, true},
                                           Layout{2, 3, 1, 2, comm::Reduction::ordered, true},
                                           Layout{1, 2, 1, 2, comm::Reduction::native}));

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

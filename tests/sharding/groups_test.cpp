// Parameters of one model that are spread over different ranks: each kind has its own shard group, replicas
// and rule.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd/ops.h"
#include "nn/layers.h"
#include "sharding/sharded_model.h"
#include "support/cpu_fixture.h"

namespace sherd::test {
namespace {

using sharding::RankGroups;
using tensor::Tensor;

constexpr int ranks = 4, rows = 3, in = 16, hidden = 24, out = 5;

/// x → dense → expert; ranks 0 and 1 have another expert than 2 and 3.
class Experts : public nn::Model {
 public:
  explicit Experts(int expert) {
    dense_ = add("dense", std::make_shared<nn::Linear>(in, hidden, no_bias()));
    expert_ = add("expert" + std::to_string(expert), std::make_shared<nn::Linear>(hidden, out, no_bias()));
    dense_->mark_block();
    expert_->mark_block();
  }
  static nn::LinearOptions no_bias() {
    nn::LinearOptions options;
    options.bias = false;
    return options;
  }
  const nn::ParameterPtr& dense() const { return dense_->weight(); }
  const nn::ParameterPtr& expert() const { return expert_->weight(); }

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    return autograd::mean_squared_error((*expert_)(tape, (*dense_)(tape, tape.input(batch.at("x")))),
                                        batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> dense_, expert_;
};

using Matrix = std::vector<double>;

/// a[m,k]·b[k,n], either as it stands or transposed in memory.
Matrix product(const Matrix& a, bool at, const Matrix& b, bool bt, int m, int k, int n) {
  Matrix c(static_cast<std::size_t>(m * n));
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      for (int l = 0; l < k; ++l)
        c[static_cast<std::size_t>(i * n + j)] += a[static_cast<std::size_t>(at ? l * m + i : i * k + l)] *
                                                  b[static_cast<std::size_t>(bt ? j * k + l : l * n + j)];
  return c;
}

Matrix input(int rank, int micro, int n, double phase) {
  Matrix x(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = std::sin(phase + 0.7 * static_cast<double>(i) + rank + 10 * micro);
  return x;
}

Matrix weights_of(const Tensor& w) {
  return {w.data<float>(), w.data<float>() + w.numel()};
}

struct Gradients {
  Matrix dense, expert;
};

/// By the formulas of two linear layers and a mean of squares, in double.
Gradients by_hand(const Matrix& dense, const Matrix& expert, int rank, int micro) {
  const Matrix x = input(rank, micro, rows * in, 0), y = input(rank, micro, rows * out, 2);
  const Matrix h = product(x, false, dense, true, rows, in, hidden);
  Matrix d = product(h, false, expert, true, rows, hidden, out);
  for (std::size_t i = 0; i < d.size(); ++i) d[i] = 2 * (d[i] - y[i]) / static_cast<double>(d.size());
  const Matrix dh = product(d, false, expert, false, rows, out, hidden);
  return {product(dh, true, x, false, hidden, rows, in), product(d, true, h, false, out, rows, hidden)};
}

void add_to(Matrix& sum, const Matrix& x) {
  sum.resize(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
}

double squares(const Matrix& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return sum;
}

tensor::Batch batch_of_experts(device::Device& device, int rank, int micro) {
  const Matrix x = input(rank, micro, rows * in, 0), y = input(rank, micro, rows * out, 2);
  return {{"x", Tensor::of<float>(device, {rows, in}, std::vector<float>(x.begin(), x.end()))},
          {"y", Tensor::of<float>(device, {rows, out}, std::vector<float>(y.begin(), y.end()))}};
}

struct GroupsCase {
  int stage;
  bool dense_replicas;  ///< dense parameters sharded over pairs, which are replicas of each other; else over
                        ///< all four
  int micro_batches;
};
void PrintTo(const GroupsCase& c, std::ostream* to) {
  *to << "stage " << c.stage << (c.dense_replicas ? ", replicas" : "") << ", " << c.micro_batches;
}

class Groups : public ::testing::TestWithParam<GroupsCase> {};

TEST_P(Groups, EachKindOfParameterIsSummedOverItsOwnRanks) {
  const GroupsCase& c = GetParam();
  comm::run_local(ranks, {.timeout_seconds = 20}, [&](comm::Communicator& world) {
    const int rank = world.rank();
    const auto pair = world.split(rank / 2, rank), across = world.split(rank % 2, rank);
    Cpu machine(1);
    auto model = std::make_shared<Experts>(rank / 2);
    sharding::ShardingOptions options;
    options.placements = sharding::make_placements(c.stage, DType::f32, DType::f32, DType::f32);
    options.rules = {{{{"exp_avg"}, {"exp_avg_sq"}}}, {{}, 128}};
    options.rule_of = [&](const autograd::Parameter& p) { return &p == model->expert().get() ? 1 : 0; };
    options.seed = 3;
    const RankGroups dense = c.dense_replicas ? RankGroups(*pair, across.get()) : RankGroups(world);
    sharding::StateSources sources{dense, *machine.kernels};
    sources.model_ranks = &world;
    sources.groups_of = [&](const autograd::Parameter& p) {
      return &p == model->expert().get() ? RankGroups(*pair) : dense;
    };
    sharding::ShardedModel sharded(model, options, sources);

    Matrix dense_weights, expert_weights[2];
    {
      const auto first = sharded.gather(*model->dense()), second = sharded.gather(*model->expert());
      dense_weights = weights_of(model->dense()->value);
      expert_weights[rank / 2] = weights_of(model->expert()->value);
    }
    // The other pair's expert, for the norm.
    std::vector<float> mine(expert_weights[rank / 2].begin(), expert_weights[rank / 2].end());
    const auto n = static_cast<std::int64_t>(mine.size());
    const Tensor own = Tensor::of<float>(*machine.device, {n}, mine);
    const Tensor both = Tensor::empty(*machine.device, {2 * n}, DType::f32);
    across->all_gather({{own, both}}).wait();
    for (int e = 0; e < 2; ++e)
      expert_weights[e].assign(both.data<float>() + e * n, both.data<float>() + (e + 1) * n);
    EXPECT_NE(expert_weights[0], expert_weights[1]);

    sharding::Pass pass(sharded);
    for (int micro = 0; micro < c.micro_batches; ++micro) {
      pass.begin({}, micro + 1 == c.micro_batches);
      pass.begin_backward((*model)(pass.tape(), batch_of_experts(*machine.device, rank, micro)), 1);
      while (pass.continue_backward()) {
      }
      pass.end();
    }
    sharded.finish_gradients();
    Matrix dense_sum, expert_sum[2];
    for (int micro = 0; micro < c.micro_batches; ++micro)
      for (int r = 0; r < ranks; ++r) {
        const Gradients g = by_hand(dense_weights, expert_weights[r / 2], r, micro);
        add_to(dense_sum, g.dense);
        add_to(expert_sum[r / 2], g.expert);
      }
    for (sharding::Segment* segment : sharded.trainable_segments()) {
      const bool expert = segment->layout().parameters()[0] == model->expert();
      EXPECT_EQ(segment->moments().size(), expert ? 0u : 2u);
      EXPECT_EQ(segment->layout().shard() % (expert ? 128 : 64), 0);
      EXPECT_EQ(segment->layout().ranks(), expert || c.dense_replicas ? 2 : 4);
      const Matrix& sum = expert ? expert_sum[rank / 2] : dense_sum;
      const Tensor got = segment->own_gradients();
      for (const auto& piece : segment->layout().pieces(segment->own_begin(), segment->own_end()))
        for (std::int64_t i = 0; i < piece.count; ++i)
          ASSERT_NEAR(got.data<float>()[piece.flat_begin - segment->own_begin() + i],
                      sum[static_cast<std::size_t>(piece.parameter_begin + i)], 1e-5)
              << segment->name() << " on rank " << rank;
    }
    const double expected = squares(dense_sum) + squares(expert_sum[0]) + squares(expert_sum[1]);
    EXPECT_NEAR(sharded.gradients().sum_of_squares().value() / expected, 1, 1e-5);
    sharded.end_step();
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Groups,
                         ::testing::Values(GroupsCase{0, false, 1}, GroupsCase{0, true, 2},
                                           GroupsCase{1, true, 1}, GroupsCase{2, false, 2},
                                           GroupsCase{2, true, 1}, GroupsCase{3, true, 3},
                                           GroupsCase{3, false, 1}),
                         [](const auto& test) {
                           return "stage" + std::to_string(test.param.stage) +
                                  (test.param.dense_replicas ? "_replicas" : "") + "_" +
                                  std::to_string(test.param.micro_batches);
                         });

}  // namespace
}  // namespace sherd::test

// Experts move tokens that leave their rank, and parameters of the experts that have tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "engine/setup/process_grid.h"
#include "sharding/parallel/experts/moe.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using comm::Axis;
using sherd::testing::TempFolder;

constexpr int experts = 8, expert_layers = 2, hidden = 32;

RunSpec spec_of(int ranks, int expert) {
  RunSpec spec;
  spec.ranks = ranks, spec.expert = expert;
  spec.stage = 3, spec.layers = expert_layers, spec.hidden = hidden, spec.tied = false;
  spec.moe = R"("experts": 8, "top_k": 2, "ffn_hidden_size": 48)";
  return spec;
}

tensor::Batch batch_of(Engine& engine) {
  return synthetic_batch(engine.device(), 2, 24, 101, 0, 0, engine.dist().rank());
}

std::int64_t all_to_all_of(Engine& engine) {
  std::int64_t bytes = 0;
  for (const auto& [axis, traffic] : engine.groups().traffic())
    if (axis == Axis::expert) bytes += static_cast<std::int64_t>(traffic.all_to_all);
  return bytes;
}

/// Rows go to their experts and back, and so do their gradients; full recompute runs forward once more.
TEST(ExpertTraffic, CountsTheTokensThatLeaveOncePerWay) {
  for (const auto& [recompute, ways] : {std::pair{"none", 4}, {"full", 6}}) {
    RunSpec spec = spec_of(4, 2);
    spec.recompute = recompute;
    std::vector<std::int64_t> left(4), bytes(4);
    launch_ranks(4, [&](const DistributedPtr& dist) {
      const auto engine = make_engine(dist, spec);
      const auto rank = static_cast<std::size_t>(dist->rank());
      engine->groups().reset_traffic();
      const autograd::Var loss = engine->forward(batch_of(*engine));
      engine->backward(loss);
      for (const auto& [path, layer] : parallel::layers_of_experts(engine->module())) {
        const parallel::RoutingTotals totals = layer->take_totals();
        ASSERT_EQ(totals.choices, 2 * 24 * 2);
        for (int e = 0; e < experts; ++e)
          if (e / (experts / 2) != dist->rank() % 2)
            left[rank] += totals.per_expert[static_cast<std::size_t>(e)];
      }
      bytes[rank] = all_to_all_of(*engine);
      engine->step();
    });
    const std::int64_t rows = left[0] + left[1] + left[2] + left[3];
    EXPECT_GT(rows, 2 * expert_layers);
    EXPECT_EQ(bytes[0] + bytes[1] + bytes[2] + bytes[3], ways * rows * hidden * 2) << recompute;
  }
}

/// Sends all tokens to experts 0 and 1.
void choose_two(Engine& engine) {
  for (const auto& [path, layer] : parallel::layers_of_experts(engine.module())) {
    std::vector<float> bias(experts);
    bias[0] = bias[1] = 10;
    layer->restore(bias);
  }
}

/// Bytes of this rank's parameters on NVMe: those that are read, where two experts of each layer are.
std::uint64_t bytes_in_use(Engine& engine) {
  std::uint64_t bytes = 0;
  for (const auto& unit : engine.sharded().units()) {
    const std::string& name = unit->name();
    if (unit->on_demand() && !name.ends_with(".0") && !name.ends_with(".1")) continue;
    for (const auto& segment : unit->segments())
      if (segment->parameters().stored())
        bytes += static_cast<std::uint64_t>(segment->layout().shard()) * sizeof(bf16);
  }
  return bytes;
}

TEST(ExpertTraffic, ExpertsWithoutTokensAreNotRead) {
  for (const auto& [ranks, expert] : {std::pair{1, 1}, {2, 1}, {2, 2}}) {
    const TempFolder folder;
    RunSpec spec = spec_of(ranks, expert);
    spec.moe += R"(, "router": "sigmoid", "bias_update": 1e-3)";
    spec.offload_param = "nvme", spec.offload_param_extra = R"(, "max_in_cpu": 0)";
    spec.nvme_path = folder.path();
    launch_ranks(ranks, [&](const DistributedPtr& dist) {
      const auto engine = make_engine(dist, spec);
      choose_two(*engine);
      const std::uint64_t once = bytes_in_use(*engine), before = engine->io_bytes().read;
      constexpr std::uint64_t passes = 3;  // of which the first records the order, and later ones read ahead
      for (std::uint64_t pass = 0; pass < passes; ++pass) engine->eval_batch(batch_of(*engine));
      EXPECT_EQ(engine->io_bytes().read - before, passes * once) << dist->rank();
      // In training what backward needs comes again, but for what is in use as it begins.
      const std::uint64_t trains = engine->io_bytes().read;
      engine->backward(engine->forward(batch_of(*engine)));
      EXPECT_GT(engine->io_bytes().read - trains, once) << dist->rank();
      EXPECT_LE(engine->io_bytes().read - trains, 2 * once) << dist->rank();
    });
  }
}

/// All micro-batches pass a layer while its experts stay.
TEST(ExpertTraffic, LayersInTurnReadExpertsOncePerWay) {
  const TempFolder folder;
  RunSpec spec = spec_of(1, 1);
  spec.schedule = "layered", spec.accumulation = 4, spec.recompute = "full", spec.steps = 3;
  spec.offload_param = "nvme", spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 10)";
  spec.nvme_path = folder.path();
  std::uint64_t all = 0, before = 0;
  std::uint64_t after = 0;
  launch_ranks(1, [&](const DistributedPtr& dist) {
    const auto engine = make_engine(dist, spec);
    for (const auto& unit : engine->sharded().units())
      for (const auto& segment : unit->segments())
        if (segment->parameters().stored())
          all += static_cast<std::uint64_t>(segment->layout().shard()) * sizeof(bf16);
    for (int step = 0; step < 3; ++step) {
      before = engine->io_bytes().read;
      int micro = 0;
      engine->train_batch([&] { return synthetic_batch(engine->device(), 2, 24, 101, step, micro++, 0); });
      after = engine->io_bytes().read;
    }
  });
  EXPECT_GT(after - before, all);
  // Once forward, once backward; where buffers are short some are read again. Each micro-batch by itself
  // would be four times as much.
  EXPECT_LE(after - before, all * 5 / 2);
}

/// Experts that no token has chosen in a step still decay, as their gradients are zero.
TEST(ExpertTraffic, ExpertsWithoutTokensAreUpdatedByZeroGradients) {
  for (const int stage : {1, 3}) {
    RunSpec spec = spec_of(1, 1);
    spec.stage = stage, spec.dtype = "fp32", spec.steps = 3;
    spec.moe += R"(, "router": "sigmoid", "bias_update": 1e-3)";
    spec.optimizer = R"("type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.5})";
    RunResult at_first;
    launch_ranks(1, [&](const DistributedPtr& dist) { collect_weights(*make_engine(dist, spec), at_first); });
    double left = 1;  // of a weight that only decays
    spec.between_steps = [&](Engine& engine) { choose_two(engine), left *= 1 - engine.get_lr()[0] * 0.5; };
    const RunResult trained = train_local(spec);
    const auto weight = [](const RunResult& run, int expert, std::size_t i) {
      const std::vector<std::byte>& bytes =
          run.masters.at(cat("blocks.1.mlp.experts.", expert, ".up.weight"));
      float value;
      std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
      return static_cast<double>(value);
    };
    for (std::size_t i = 0; i < 100; ++i)
      ASSERT_NEAR(weight(trained, 5, i), weight(at_first, 5, i) * left, 1e-8) << stage;
    ASSERT_LT(left, 0.995);
    EXPECT_GT(std::abs(weight(trained, 1, 7) - weight(at_first, 1, 7) * left), 1e-7);
  }
}

TEST(ExpertTraffic, ADeadRankEndsTheOthersWaits) {
  RunSpec spec = spec_of(2, 2);
  spec.steps = 3;
  spec.before_batch = [](int rank, int step) {
    if (rank == 1 && step == 1) fail(ErrorKind::data, "no more data");
  };
  sherd::testing::expect_error(ErrorKind::data, "no more data", [&] { train_local(spec); });
}

TEST(ExpertTraffic, SizesThatDoNotDivideAreNamed) {
  RunSpec spec = spec_of(3, 3);
  sherd::testing::expect_error(ErrorKind::config, "parallel.expert 3 does not divide 8 experts",
                               [&] { train_local(spec); });
  spec = spec_of(2, 2);
  spec.moe.clear();
  sherd::testing::expect_error(ErrorKind::config, "the model has no experts to share out",
                               [&] { train_local(spec); });
  spec = spec_of(4, 4);
  spec.shard_size = 2;
  sherd::testing::expect_error(ErrorKind::config, "shard_size 2 is no multiple of parallel.expert 4",
                               [&] { train_local(spec); });
  spec = spec_of(4, 2);
  spec.tensor = 2;
  spec.optimizer = R"("type": "Muon", "params": {"lr": 0.01})";
  sherd::testing::expect_error(ErrorKind::config, "Muon takes whole matrices", [&] { train_local(spec); });
}

/// A layer of experts on what takes no gradient, whose tokens all go to the first of two ranks: the other has
/// nothing to compute, and takes part in backward all the same.
class OnInput : public nn::Model {
 public:
  explicit OnInput(const parallel::Layout& layout) {
    parallel::MoeOptions options;
    options.hidden = 8, options.ffn_hidden = 16, options.experts = 4;
    options.routing = {.top_k = 2, .scores = RouterScores::sigmoid, .normalize = true};
    options.bias_update = 1e-3;
    experts_ = add("experts", std::make_shared<parallel::Moe>(options, layout));
    experts_->restore(std::vector<float>{10, 10, 0, 0});
  }

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    return autograd::mean_squared_error((*experts_)(tape, tape.input(batch.at("x"))), batch.at("y"));
  }

 private:
  std::shared_ptr<parallel::Moe> experts_;
};

TEST(ExpertTraffic, RanksWithoutRowsGoBackWithTheOthers) {
  std::map<int, double> losses;
  for (const int expert : {1, 2})
    launch_ranks(2, [&](const DistributedPtr& dist) {
      const config::Config config = config::parse_text(cat(
          R"({"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "parallel": {"timeout_seconds": 30, "expert": )",
          expert, "}}"));
      const auto groups = make_groups(dist, config);
      Engine engine(dist, std::make_shared<OnInput>(layout_of(*groups, config)), config, nullptr, nullptr,
                    groups);
      std::vector<float> x, y;
      for (int i = 0; i < 48; ++i)
        x.push_back(std::sin(static_cast<float>(i))), y.push_back(std::cos(x.back()));
      const tensor::Batch batch{{"x", tensor::Tensor::of<float>(engine.device(), {3, 2, 8}, x)},
                                {"y", tensor::Tensor::of<float>(engine.device(), {3, 2, 8}, y)}};
      double loss = 0;
      for (int step = 0; step < 3; ++step) loss = engine.train_batch([&] { return batch; }).loss;
      if (dist->rank() == 0) losses[expert] = loss;
    });
  EXPECT_EQ(losses[2], losses[1]);
  EXPECT_LT(losses[1], 0.9);
}

}  // namespace
}  // namespace sherd::test

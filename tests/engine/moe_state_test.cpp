// Routers' biases and counts of steps (nn::StepState): the same however ranks share the work, and in
// checkpoints.
#include <gmock/gmock.h>

#include <mutex>
#include <numeric>
#include <tuple>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/weights.h"
#include "engine/report/metrics.h"
#include "engine/report/report.h"
#include "engine/step/step_states.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using parallel::RoutingTotals;
using sherd::testing::TempFolder;
using ::testing::HasSubstr;

constexpr float update = 0.0625f;

RunSpec base() {
  RunSpec spec;
  spec.ranks = 1, spec.stage = 2, spec.accumulate_in = "fp32", spec.dtype = "fp32", spec.dropout = 0;
  spec.accumulation = 4, spec.steps = 6, spec.tied = false, spec.clipping = 0;
  spec.moe =
      R"("experts": 4, "ffn_hidden_size": 24, "bias_update": 0.0625, "first_dense": 1, "jitter": 0.05)";
  return spec;
}

/// A rank's values before each step: by layer, biases, and what the step before told.
struct SeenRouting {
  bool applied;
  std::vector<std::vector<float>> biases;
  std::vector<RoutingTotals> totals;
};

SeenRouting look_at(Engine& engine) {
  SeenRouting now{engine.was_step_applied(), {}, {}};
  for (const auto& [path, layer] : parallel::layers_of_experts(engine.module())) {
    now.biases.push_back(layer->bias());
    now.totals.push_back(layer->last_step());
  }
  return now;
}

/// Rank 0's values, after checking that all ranks have the same.
std::vector<SeenRouting> run(RunSpec spec, int from = 0, int last = 0) {
  std::mutex mutex;
  std::map<int, std::vector<SeenRouting>> ranks;
  spec.between_steps = [&](Engine& engine) {
    const std::lock_guard lock(mutex);
    ranks[engine.dist().rank()].push_back(look_at(engine));
  };
  train_local(spec, from, last);
  for (const auto& [rank, steps] : ranks)
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i].biases, ranks[0][i].biases) << "rank " << rank << ", step " << i;
      for (std::size_t l = 0; l < steps[i].totals.size(); ++l)
        EXPECT_EQ(steps[i].totals[l].per_expert, ranks[0][i].totals[l].per_expert);
    }
  return ranks[0];
}

void expect_same(const std::vector<SeenRouting>& got, const std::vector<SeenRouting>& want,
                 const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].biases, want[i].biases) << what << ", step " << i;
    for (std::size_t l = 0; l < want[i].totals.size(); ++l) {
      const RoutingTotals &a = got[i].totals[l], &b = want[i].totals[l];
      EXPECT_EQ(a.per_expert, b.per_expert) << what << ", step " << i;
      EXPECT_EQ(a.micro_batches, b.micro_batches) << what;
      EXPECT_NEAR(a.balance, b.balance, 1e-6 * b.balance) << what;
      EXPECT_NEAR(a.z, b.z, 1e-5 * b.z) << what;
    }
  }
}

TEST(StepStates, MoveBiasesByTheLoadOfTheWholeStep) {
  const std::vector<SeenRouting> steps = run(base());
  ASSERT_EQ(steps.size(), 6u);
  ASSERT_EQ(steps[0].biases, (std::vector<std::vector<float>>(2, std::vector<float>(4))));
  for (std::size_t i = 1; i < steps.size(); ++i)
    for (std::size_t l = 0; l < 2; ++l) {
      const RoutingTotals& told = steps[i].totals[l];
      EXPECT_EQ(told.choices, 4 * 2 * 24 * 2);
      EXPECT_EQ(told.micro_batches, 4);
      EXPECT_EQ(std::accumulate(told.per_expert.begin(), told.per_expert.end(), std::int64_t{0}),
                told.choices);
      EXPECT_GT(told.balance, 3.9);  // at least 1 for each micro-batch, nearly
      for (std::size_t e = 0; e < 4; ++e) {
        const double mean = static_cast<double>(told.choices) / 4,
                     n = static_cast<double>(told.per_expert[e]);
        const float moved = n < mean ? update : n > mean ? -update : 0;
        EXPECT_EQ(steps[i].biases[l][e], steps[i - 1].biases[l][e] + moved);
      }
    }
}

TEST(StepStates, AreTheSameHoweverRanksShareTheWork) {
  const std::vector<SeenRouting> want = run(base());
  const auto check = [&](const char* what, const std::function<void(RunSpec&)>& change) {
    RunSpec spec = base();
    change(spec);
    expect_same(run(spec), want, what);
  };
  check("2 data ranks", [](RunSpec& s) { s.ranks = 2, s.accumulation = 2; });
  check("4 data ranks, stage 3", [](RunSpec& s) { s.ranks = 4, s.accumulation = 1, s.stage = 3; });
  check("replicas", [](RunSpec& s) { s.ranks = 4, s.accumulation = 1, s.shard_size = 2; });
  check("recompute", [](RunSpec& s) { s.recompute = "full"; });
  check("recompute, layered", [](RunSpec& s) { s.recompute = "full", s.schedule = "layered", s.stage = 3; });
  check("stages", [](RunSpec& s) { s.ranks = 2, s.pipeline = 2; });
  check("stages and data", [](RunSpec& s) { s.ranks = 4, s.pipeline = 2, s.accumulation = 2; });
  check("context ranks", [](RunSpec& s) { s.ranks = 2, s.context = 2; });
  check("tensor ranks", [](RunSpec& s) { s.ranks = 2, s.tensor = 2; });
  check("optimizer on the host", [](RunSpec& s) { s.offload_optimizer = "cpu"; });
}

/// Also jitter and what lies beside experts.
TEST(StepStates, LeaveTheBitsAsTheyAreOverDataAndExpertRanks) {
  for (const char* more : {R"(, "shared_experts": 1, "shared_expert_gate": true, "router": "sigmoid")",
                           R"(, "use_residual": true, "capacity_factor": 1.0, "aux_loss_type": "gshard")",
                           R"(, "aux_loss_type": "hf", "aux_loss": 0.1, "z_loss": 1e-3)"}) {
    RunSpec spec = base();
    spec.dtype = "bf16", spec.steps = 4, spec.moe += more;
    const auto want = train_local(spec).bits();
    for (const auto& [ranks, expert, stage] : {std::tuple{2, 1, 3}, {2, 2, 2}, {4, 2, 3}, {4, 4, 2}}) {
      spec.ranks = ranks, spec.accumulation = 4 / ranks, spec.expert = expert, spec.stage = stage;
      EXPECT_TRUE(train_local(spec).bits() == want) << more << ' ' << ranks << ' ' << expert << ' ' << stage;
    }
  }
}

TEST(StepStates, OfAllLayersTogetherAreToo) {
  RunSpec spec = base();
  spec.moe += R"(, "aux_loss_type": "hf", "aux_loss": 0.5)";
  const std::vector<SeenRouting> want = run(spec);
  double sum = 0;
  for (const RoutingTotals& totals : want.back().totals) sum += totals.balance / 4 / 2;
  EXPECT_GT(sum, 1.9);  // an even load has top_k
  EXPECT_LT(sum, 3);
  for (const char* schedule : {"accumulate", "layered"})
    for (const char* recompute : {"none", "full"}) {
      spec.schedule = schedule, spec.recompute = recompute;
      expect_same(run(spec), want, schedule);
    }
  spec.ranks = 4, spec.accumulation = 2, spec.context = 2;
  expect_same(run(spec), want, "ranks");
}

TEST(StepStates, ComeBackFromCheckpointsOfAnyLayout) {
  const TempFolder folder;
  RunSpec spec = base();
  const std::vector<SeenRouting> want = run(spec);
  const auto change = [&](int i) {
    RunSpec out = base();
    out.directory = folder.path();
    if (i == 1) out.ranks = 2, out.accumulation = 2, out.stage = 3;
    if (i == 2) out.ranks = 2, out.pipeline = 2;
    if (i == 3) out.ranks = 2, out.tensor = 2;
    return out;
  };
  for (int i = 0; i < 4; ++i) {
    (void)run(change(i), 0, 3);
    for (int k = 0; k < 4; ++k) {
      const std::vector<SeenRouting> got = run(change(k), 3, 4);
      ASSERT_EQ(got.size(), 1u);
      EXPECT_EQ(got[0].biases, want[3].biases) << i << " to " << k;
      (void)run(change(i), 0, 3);
    }
  }
  RunSpec resumed = base();
  resumed.directory = folder.path(), resumed.resume_at = 2;
  EXPECT_EQ(run(resumed).back().biases, want.back().biases);
}

TEST(StepStates, ComeWithWeightsAlone) {
  const TempFolder folder;
  RunSpec spec = base();
  spec.directory = folder.path();
  (void)run(spec, 0, 3);
  comm::run_local(1, comm::CommOptions{}, [&](comm::Communicator& world) {
    const auto dist = std::make_shared<Distributed>(
        std::shared_ptr<comm::Communicator>(std::shared_ptr<void>(), &world), 0, 1);
    const auto made = make_engine(dist, spec);
    const engine::CheckpointReader reader(engine::checkpoint_folder(spec.directory));
    engine::CheckpointWeights weights(reader, made->device());
    engine::load_weights(weights, made->sharded(), made->kernels());
    const std::vector<std::vector<float>> biases = look_at(*made).biases;
    EXPECT_NE(biases, (std::vector<std::vector<float>>(2, std::vector<float>(4))));
    EXPECT_EQ(biases, run(base())[3].biases);
  });
}

TEST(StepStates, BeginAnewWhereACheckpointHasNone) {
  const TempFolder folder;
  RunSpec without = base(), with = base();
  without.moe = R"("experts": 4, "ffn_hidden_size": 24, "first_dense": 1)";
  without.directory = with.directory = folder.path();
  (void)run(without, 0, 2);
  EXPECT_EQ(run(with, 2, 4)[0].biases, (std::vector<std::vector<float>>(2, std::vector<float>(4))));
  EXPECT_TRUE(run(without, 4, 5)[0].biases[0].empty());  // and those of the other are dropped
  RunSpec dense = base();
  dense.moe = "", dense.directory = folder.path();
  dense.ranks = 1;
  EXPECT_TRUE(run(dense)[0].biases.empty());
}

TEST(StepStates, StayWhereAStepIsSkipped) {
  RunSpec spec = base();
  spec.dtype = "fp16", spec.loss_scale_window = 1, spec.steps = 24, spec.accumulation = 1;
  const std::vector<SeenRouting> steps = run(spec);
  int skipped = 0;
  for (std::size_t i = 1; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].biases == steps[i - 1].biases, !steps[i].applied) << i;
    skipped += !steps[i].applied;
  }
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 12);
}

TEST(StepStates, OfAStepThatFailsAreDropped) {
  RunSpec spec = base();
  int calls = 0;
  bool failed = false;
  spec.before_batch = [&](int, int step) {
    if (step == 1 && ++calls == 3) fail(ErrorKind::data, "no more data");
  };
  spec.when_failed = [&](Engine& engine) {
    failed = true;
    const SeenRouting now = look_at(engine);
    for (const auto& [path, layer] : parallel::layers_of_experts(engine.module()))
      EXPECT_EQ(layer->take_totals().choices, 2 * 2 * 24 * 2) << "two micro-batches wait for the rest";
    EXPECT_EQ(now.totals[0].choices, 4 * 2 * 24 * 2);
  };
  sherd::testing::expect_error(ErrorKind::data, "no more data", [&] { train_local(spec); });
  EXPECT_TRUE(failed);
}

/// A weight that is no number tells as everywhere: by the loss.
TEST(StepStates, ARouterOfNoNumbersEndsTheStepByItsLoss) {
  for (const char* drop : {"weight", "position"}) {
    RunSpec spec = base();
    spec.moe = cat(spec.moe, R"(, "capacity_factor": 1, "drop": ")", drop, '"');
    spec.optimizer = R"("type": "SGD", "params": {"lr": 1e38})";
    sherd::testing::expect_error(ErrorKind::numerics, "at step", [&] { train_local(spec); });
  }
}

TEST(StepStates, AreWhatMetricsTell) {
  RoutingTotals one, two;
  one.per_expert = {6, 2}, one.choices = 8, one.dropped = 2, one.micro_batches = 2, one.balance = 3,
  one.z = 1;
  two.per_expert = {4, 4}, two.choices = 8, two.micro_batches = 2, two.balance = 2, two.z = 2;
  engine::StepMetrics metrics;
  EXPECT_THAT(to_json(metrics), ::testing::Not(HasSubstr("moe")));
  metrics.experts = {{"blocks.0.mlp", one}, {"blocks.1.mlp", two}};
  EXPECT_THAT(
      to_json(metrics),
      HasSubstr(R"("moe":{"balance_loss":1.25,"z_loss":0.75,"layers":["blocks.0.mlp","blocks.1.mlp"],)"
                R"("imbalance":[1.5,1],"dropped":[0.25,0],"tokens":[[6,2],[4,4]]})"));
  const std::string table = engine::experts_table(metrics.experts);
  EXPECT_THAT(table, HasSubstr("blocks.0.mlp  25.00 %  75.00 %        1.500  25.00 %        1.5000  0.5000"));
}

}  // namespace
}  // namespace sherd::test

// 1-bit Adam and 1-bit LAMB: replicas that exchange compressed momentum. The same bits over tiers and
// restarts, weights that all replicas have alike (train_local() compares them), and what travels. What is
// computed is judged by one_bit_oracle_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/equality.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;

/// Two replicas of two ranks each, which freeze after 4 of 7 steps.
RunSpec two_by_two(int stage, const std::string& type = "OneBitAdam", int freeze_step = 4) {
  RunSpec spec;
  spec.stage = stage, spec.ranks = 4, spec.shard_size = 2, spec.steps = 7, spec.layers = 2;
  spec.optimizer =
      cat(R"("type": ")", type, R"(", "params": {"lr": 0.003, "weight_decay": 0.1, "freeze_step": )",
          freeze_step, R"(, "eps": 1e-4})");
  return spec;
}

class OneBit : public ::testing::TestWithParam<std::string> {
 protected:
  static RunSpec run_at(int stage) { return two_by_two(stage, GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(All, OneBit, ::testing::Values("OneBitAdam", "OneBitLamb"),
                         [](const auto& each) { return each.param; });

TEST_P(OneBit, StagesAndTiersGiveTheSameBits) {
  const TempFolder folder;
  RunSpec threads = run_at(1);
  const RunResult expected = train_local(threads);
  ASSERT_NE(expected.losses.back(), expected.losses.front());
  threads.threads = 2;
  const RunResult by_threads = train_local(threads);
  for (const int stage : {1, 2, 3})
    for (const std::string tier : {"none", "cpu", "nvme"}) {
      RunSpec spec = run_at(stage);
      spec.offload_optimizer = tier, spec.nvme_path = folder.path().string(), spec.sub_group = 4096;
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "stage " << stage << ", " << tier;
      if (!to_run({3, 3, 2}, {stage - 1, tier == "none" ? 0 : tier == "cpu" ? 1 : 2, 1})) continue;
      spec.threads = 2, spec.bucket = 2000, spec.overlap = true;
      if (stage == 3) spec.offload_param = tier;
      EXPECT_TRUE(train_local(spec).bits() == by_threads.bits()) << "stage " << stage << ", " << tier;
    }
}

TEST_P(OneBit, EachRankMayBeAReplica) {
  const TempFolder folder;
  RunSpec spec = run_at(0);
  spec.shard_size = 0;  // which is 1 then
  const RunResult expected = train_local(spec);
  spec.shard_size = 1;
  for (const int stage : {0, 1, 2, 3})
    for (const std::string tier : {"none", "nvme"}) {
      if (stage == 0 && tier != "none") continue;
      spec.stage = stage, spec.offload_optimizer = tier, spec.nvme_path = folder.path().string();
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "stage " << stage << ", " << tier;
    }
}

TEST_P(OneBit, ResumesToTheBitBeforeAndAfterItFreezes) {
  for (const int shard_size : {1, 2, 4}) {
    RunSpec spec = run_at(2);
    spec.shard_size = shard_size;
    const RunResult whole = train_local(spec);
    for (const int step : {3, 4, 6}) {
      const TempFolder folder;
      spec.directory = folder.path().string(), spec.resume_at = step;
      EXPECT_TRUE(train_local(spec).bits() == whole.bits()) << "after step " << step;
    }
  }
}

/// Resumed with a freeze_step that the checkpoint is past, a run freezes at once, as if that had been its
/// step.
TEST_P(OneBit, FreezesOnResumeWhereItsStepHasPassed) {
  for (const int shard_size : {1, 2, 4}) {
    const TempFolder folder;
    const auto run = [&](int freeze_step) {
      RunSpec spec = two_by_two(2, GetParam(), freeze_step);
      spec.shard_size = shard_size, spec.directory = folder.path().string();
      return spec;
    };
    train_local(run(100), 0, 4);
    const RunResult expected = train_local(run(4), 4);
    RunSpec early = run(2);
    EXPECT_TRUE(train_local(early, 4).bits() == expected.bits()) << shard_size;
    early.resume_at = 6;
    EXPECT_TRUE(train_local(early, 4).bits() == expected.bits()) << shard_size << ", resumed once more";
  }
}

TEST_P(OneBit, EveryPrecisionScheduleAndLayout) {
  const TempFolder folder;
  for (const std::string dtype : {"fp32", "fp16"}) {
    RunSpec spec = run_at(2);
    spec.dtype = dtype, spec.accumulation = 2;
    const RunResult expected = train_local(spec);
    spec.stage = 3, spec.offload_optimizer = "nvme", spec.nvme_path = folder.path().string();
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << dtype;
    spec.offload_param = "nvme", spec.schedule = "layered", spec.recompute = "full", spec.tied = false;
    RunSpec untied = run_at(2);
    untied.dtype = dtype, untied.accumulation = 2, untied.tied = false;
    EXPECT_TRUE(train_local(spec).bits() == train_local(untied).bits()) << dtype << ", layered";
  }
  RunSpec tensor = run_at(2);
  tensor.shard_size = 1, tensor.tensor = 2;
  const RunResult expected = train_local(tensor);
  tensor.stage = 3, tensor.offload_optimizer = "cpu";
  EXPECT_TRUE(train_local(tensor).bits() == expected.bits());
  RunSpec stages = run_at(2);
  stages.shard_size = 1, stages.pipeline = 2;  // a table that both stages hold is reduced exactly
  const RunResult two = train_local(stages);
  stages.stage = 3, stages.offload_optimizer = "nvme", stages.nvme_path = folder.path().string();
  EXPECT_TRUE(train_local(stages).bits() == two.bits());
}

/// A rank's states after `steps` steps in which all ranks read the same samples.
struct Alike {
  double norm = 0;
  std::vector<std::vector<float>> momentum;  ///< by segment
  std::vector<sharding::SegmentLayout> layouts;
  std::vector<std::uint64_t> sent;  ///< to other replicas, by step
};

Alike train_alike(RunSpec spec, int freeze_step) {
  spec.dtype = "fp32", spec.dropout = 0, spec.clipping = 0, spec.shard_size = 1;
  spec.optimizer =
      cat(R"("type": "OneBitAdam", "params": {"lr": 0.003, "eps": 1e-4, "freeze_step": )", freeze_step, "}");
  Alike out;
  launch_ranks(spec.ranks, [&](DistributedPtr dist) {
    const auto engine = make_engine(dist, spec);
    comm::Communicator& replicas = engine->groups().group(comm::Axis::replica);
    for (int step = 0; step < spec.steps; ++step) {
      replicas.reset_traffic();
      const tensor::Batch batch = synthetic_batch(engine->device(), 2, 16, 64, step, 0, 0);
      engine->backward(engine->forward(batch));
      engine->step();
      if (dist->rank() == 0) out.sent.push_back(replicas.traffic().payload());
    }
    if (dist->rank() > 0) return;
    out.norm = *engine->get_global_grad_norm();
    for (const sharding::Segment* segment : engine->sharded().trainable_segments()) {
      const float* m = segment->moments()[0].tensor().data<float>();
      out.momentum.emplace_back(m, m + segment->update_end());
      out.layouts.push_back(segment->layout());
    }
  });
  return out;
}

/// Where all replicas find the same gradient, its mean over them is that, and what each sends, and they agree
/// on, is the signs of the momentum that an exact step has, with the root mean square of each parameter's
/// run.
TEST(OneBitAdam, ReplicasOfOneMindAgreeOnTheSignsOfTheirMomentum) {
  RunSpec spec;
  spec.stage = 2, spec.steps = 5, spec.layers = 2;
  const Alike exact = train_alike(spec, 100), frozen = train_alike(spec, 4);
  EXPECT_NEAR(frozen.norm, exact.norm, 1e-6 * exact.norm);
  std::size_t runs = 0;
  for (std::size_t s = 0; s < exact.momentum.size(); ++s) {
    const std::int64_t all = exact.layouts[s].padded(), half = (all / 2 + 63) / 64 * 64;
    for (const auto& [begin, end] : {std::pair(std::int64_t{0}, half), std::pair(half, all)})
      for (const sharding::Piece& run : exact.layouts[s].pieces(begin, end)) {
        double squares = 0;
        const float* is = frozen.momentum[s].data() + run.flat_begin;
        const float* was = exact.momentum[s].data() + run.flat_begin;
        const autograd::Parameter& parameter = *exact.layouts[s].parameters()[run.slot];
        const std::int64_t ids = parameter.is_table && parameter.shape[0] > 101 ? 101 : parameter.shape[0];
        const std::int64_t real =  // a table's other rows are padding
            std::clamp<std::int64_t>(parameter.numel() / parameter.shape[0] * ids - run.parameter_begin, 0,
                                     run.count);
        for (std::int64_t i = 0; i < run.count; ++i) squares += static_cast<double>(was[i]) * was[i];
        const double scale = std::sqrt(squares / static_cast<double>(std::max<std::int64_t>(real, 1)));
        ++runs;
        for (std::int64_t i = 0; i < run.count; ++i) {
          if (is[i] == 0) continue;  // no gradient yet, of tokens that did not come
          ASSERT_NEAR(is[i], was[i] < 0 ? -scale : scale, 1e-5 * scale);
        }
      }
  }
  EXPECT_GT(runs, 20u);
}

/// The norm of the gradient that the ranks of one replica find without the others, in a step from the
/// checkpoint.
double norm_of_replica(RunSpec spec, int replica) {
  spec.ranks = spec.shard_size;
  double out = 0;
  launch_ranks(spec.ranks, [&](DistributedPtr dist) {
    const auto engine = make_engine(dist, spec);
    engine->load_checkpoint(spec.directory);
    const int reader = replica * spec.shard_size + dist->rank();
    const double norm =
        engine->train_batch([&] { return synthetic_batch(engine->device(), 2, 24, 101, 4, reader, 0); })
            .grad_norm;
    if (dist->rank() == 0) out = norm;
  });
  return out;
}

/// Where replicas find different gradients, which their exact mean is smaller than.
TEST_P(OneBit, TheNormIsTheRootOfTheMeanOverReplicas) {
  for (const int shard_size : {1, 2}) {
    const TempFolder folder;
    RunSpec spec = run_at(2);
    spec.dtype = "fp32", spec.dropout = 0, spec.clipping = 0, spec.steps = 5;
    spec.shard_size = shard_size, spec.directory = folder.path().string();
    train_local(spec, 0, 4);
    const int replicas = spec.ranks / shard_size;
    double squares = 0, smallest = 1e30, largest = 0;
    for (int replica = 0; replica < replicas; ++replica) {
      const double norm = norm_of_replica(spec, replica);
      squares += norm * norm / replicas;
      smallest = std::min(smallest, norm), largest = std::max(largest, norm);
    }
    ASSERT_GT(largest, 1.001 * smallest);
    for (const int stage : {1, 2, 3}) {
      spec.stage = stage;
      EXPECT_NEAR(train_local(spec, 4).norms.at(0), std::sqrt(squares), 1e-5 * std::sqrt(squares))
          << shard_size << ", stage " << stage;
    }
  }
}

/// Counted: signs and scales, 1/15.5 of what two replicas send to reduce fp16 gradients.
TEST(OneBitAdam, SendsAFifteenthOfFp16Gradients) {
  RunSpec spec;
  spec.stage = 2, spec.steps = 6, spec.layers = 2, spec.hidden = 256;
  for (const int replicas : {2, 4}) {
    spec.ranks = replicas;
    const Alike run = train_alike(spec, 4);
    double elements = 0;
    for (const sharding::SegmentLayout& layout : run.layouts)
      elements += static_cast<double>(layout.payload());
    const double fp16 = 2 * 2 * elements * (replicas - 1) / replicas;
    EXPECT_LT(static_cast<double>(run.sent[4]), fp16 / 15.5) << replicas;
    EXPECT_EQ(run.sent[4], run.sent[5]);
    EXPECT_GT(static_cast<double>(run.sent[3]), fp16) << replicas;
    // A whole run that warms up for 15 % of its steps, against fp16 gradients in all of them.
    EXPECT_GT(1 / (0.15 + 0.85 * static_cast<double>(run.sent[4]) / fp16), 4.85) << replicas;
  }
}

using Tensors = std::map<std::string, std::vector<float>>;

Tensors errors_in(const std::filesystem::path& checkpoint) {
  Tensors out;
  for (const auto& [name, bytes] : sherd::testing::whole_tensors(checkpoint)) {
    if (name.find("_error") == std::string::npos) continue;
    std::vector<float>& values = out[name];
    values.resize(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return out;
}

/// The errors as they were loaded: saved again before any step, which would mix in the gradients of other
/// ranks.
Tensors reloaded(RunSpec spec) {
  launch_ranks(spec.ranks, [&](DistributedPtr dist) {
    const auto engine = make_engine(dist, spec);
    engine->load_checkpoint(spec.directory, "global_step7");
    engine->save_checkpoint(spec.directory, "again");
  });
  return errors_in(std::filesystem::path(spec.directory) / "again");
}

/// The errors in the checkpoint that seven steps leave.
Tensors saved_errors(const RunSpec& spec) {
  train_local(spec, 0, 7);
  return errors_in(std::filesystem::path(spec.directory) / "global_step7");
}

/// A new number of replicas takes the mean of the old ones' errors; what they served is a logical tensor.
TEST(OneBitAdam, ErrorsGoIntoOtherNumbersOfReplicas) {
  const TempFolder folder;
  RunSpec spec = two_by_two(2);
  spec.directory = folder.path().string();
  const Tensors saved = saved_errors(spec);
  const auto of_replica = [](const std::string& name, int replica) {
    return cat("worker_error_", replica, name.substr(name.find('.')));
  };
  const auto expect_mean = [&](const Tensors& found, int replicas) {
    for (const auto& [name, values] : saved) {
      if (name.starts_with("server_error")) {
        EXPECT_EQ(found.at(name), values) << name << " of " << replicas;
        continue;
      }
      std::vector<float> mean = saved.at(of_replica(name, 0));
      const std::vector<float>& other = saved.at(of_replica(name, 1));
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] = (mean[i] + other[i]) / 2;
      for (int replica = 0; replica < replicas; ++replica)
        EXPECT_EQ(found.at(of_replica(name, replica)), mean) << name << " of " << replicas;
    }
  };
  RunSpec four = spec, three = spec, two = spec, one = spec;
  four.shard_size = 1, three.ranks = three.shard_size = 3, two.ranks = 2, two.shard_size = 1;
  two.offload_optimizer = "nvme", two.nvme_path = folder.path().string(), one.ranks = one.shard_size = 1;
  expect_mean(reloaded(four), 4);
  EXPECT_EQ(reloaded(two), saved) << "as many replicas, of one rank each";
  EXPECT_TRUE(reloaded(one).empty()) << "one replica has nobody to send anything to";
  EXPECT_TRUE(reloaded(three).empty());
  spec.directory = folder.path() / "from one";
  RunSpec alone = spec;
  alone.ranks = alone.shard_size = 1;
  ASSERT_TRUE(saved_errors(alone).empty());
  for (const auto& [name, values] : reloaded(spec))
    EXPECT_EQ(values, std::vector<float>(values.size())) << name << ": nothing was left out";
}

/// The norm that clips, and is told, is the same on all ranks: the root of the mean over replicas of the
/// squares of their own. Gradients that one replica alone finds not finite skip the step on all.
TEST_P(OneBit, ReplicasClipAndSkipTogether) {
  RunSpec spec = run_at(2);
  spec.dtype = "fp16", spec.steps = 16, spec.clipping = 0.01, spec.loss_scale_window = 1;
  const RunResult expected = train_local(spec);  // compares weights over all ranks
  EXPECT_GT(expected.skipped, 0) << "the loss scale doubles until gradients overflow";
  RunSpec other = spec;
  other.clipping = 1e6;
  EXPECT_FALSE(train_local(other).bits() == expected.bits());
}

/// Parameters of another rule are reduced exactly beside those whose momentum travels.
TEST_P(OneBit, BesideOtherRules) {
  const TempFolder folder;
  RunSpec spec = run_at(1);
  spec.groups = R"([{"match": "*norm*", "type": "AdamW", "lr": 0.002}, {"match": "*bias", "type": "Lamb"},
                    {"match": "*up*", "freeze_step": 6}, {"match": "*down*", "lr": 0.001}])";
  const RunResult expected = train_local(spec);
  for (const int stage : {2, 3}) {
    spec.stage = stage, spec.offload_optimizer = "nvme", spec.nvme_path = folder.path().string();
    spec.sub_group = 4096, spec.offload_extra = R"(, "buffer_count": 1)";
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << stage;
  }
}

}  // namespace
}  // namespace sherd::test

// Experts give the same losses, norms and weights, to the last bit, however many ranks share them out, at
// stages 2 and 3 with gradients accumulated in fp32; and wherever they lie, at every stage
// (docs/guarantees.md, "Equal to the bit"). Shared out among ranks or not, all is computed, so that the
// runs of one rank, which tests/models hold to others' numbers, stand for all.
#include <gtest/gtest.h>

#include "sharding/parallel/experts/moe.h"
#include "support/equality.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

constexpr int expert_micro_batches = 4;  // of a step

RunSpec on(int ranks, int expert, const std::string& dtype, int stage) {
  RunSpec spec;
  spec.ranks = ranks;
  spec.expert = expert;
  spec.accumulation = expert_micro_batches / ranks;
  spec.dtype = dtype;
  spec.accumulate_in = "fp32";
  spec.stage = stage;
  spec.steps = 4;
  spec.layers = 2;
  spec.model = R"(, "activation": "swiglu_clamped")";
  spec.moe = R"("experts": 8, "top_k": 2, "ffn_hidden_size": 48, "aux_loss": 0.02, "z_loss": 1e-3,
                "router_bias": true)";
  return spec;
}

std::string expert_name(const RunSpec& spec) {
  return cat(spec.ranks, " ranks, expert ", spec.expert, ", stage ", spec.stage, ", shard_size ",
             spec.shard_size);
}

void expect_expert_bits(const RunSpec& spec, const RunResult& expected) {
  const RunResult got = train_local(spec);
  EXPECT_EQ(got.losses, expected.losses) << expert_name(spec);
  EXPECT_EQ(got.norms, expected.norms) << expert_name(spec);
  EXPECT_TRUE(got.bits() == expected.bits()) << expert_name(spec);
}

class ExpertEquality : public ::testing::TestWithParam<std::string> {};

TEST_P(ExpertEquality, AnyNumberOfExpertRanksGivesTheSameBits) {
  const RunResult expected = train_local(on(1, 1, GetParam(), 2));
  ASSERT_NE(expected.losses.front(), expected.losses.back());
  int layout = 0;
  for (const auto& [ranks, expert] : {std::pair{2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}}) {
    ++layout;
    for (const int stage : {2, 3}) {
      if (!to_run({2, 5, 2}, {GetParam() == "bf16", layout - 1, stage - 2})) continue;
      RunSpec spec = on(ranks, expert, GetParam(), stage);
      spec.bucket = ranks % 4 == 0 ? 500 : 500'000'000;
      spec.overlap = expert % 2 == 0;
      expect_expert_bits(spec, expected);
    }
  }
}

/// LoRA in each expert, of its modules or of its weights, beside a base in 4 bits.
TEST_P(ExpertEquality, AlsoOfAdaptersInExperts) {
  for (const bool of_weights : {false, true}) {
    const char* adapter =
        of_weights
            ? R"("type": "lora", "rank": 4, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"])"
            : R"("type": "lora", "rank": 4, "targets": "all-linear", "base_format": "nf4")";
    SCOPED_TRACE(adapter);
    const auto with_adapter = [&](RunSpec spec) {
      spec.llama = true, spec.model.clear(), spec.adapter = adapter;
      spec.moe = R"("experts": 8, "top_k": 2, "ffn_hidden_size": 64)";
      return spec;
    };
    const RunResult expected = train_local(with_adapter(on(1, 1, GetParam(), 2)));
    ASSERT_NE(expected.losses.front(), expected.losses.back());
    RunSpec deferred = on(2, 2, GetParam(), 2);
    deferred.schedule = "zero_bubble";
    int layout = 0;
    for (const RunSpec& spec :
         {on(2, 1, GetParam(), 3), on(2, 2, GetParam(), 2), on(4, 2, GetParam(), 3), deferred})
      if (to_run({2, 2, 4}, {GetParam() == "bf16", of_weights, layout++}))
        expect_expert_bits(with_adapter(spec), expected);
  }
}

/// A fair share of the choices, or less, finds room.
TEST_P(ExpertEquality, AlsoWhereChoicesAreDropped) {
  for (const char* drop : {"weight", "position"}) {
    const auto dropping = [&](RunSpec spec) {
      spec.moe += cat(R"(, "capacity_factor": 0.75, "drop": ")", drop, '"');
      return spec;
    };
    const RunResult expected = train_local(dropping(on(1, 1, GetParam(), 3)));
    expect_expert_bits(dropping(on(4, 2, GetParam(), 3)), expected);
    expect_expert_bits(dropping(on(2, 2, GetParam(), 2)), expected);
  }
}

TEST_P(ExpertEquality, InReplicas) {
  const auto without_accumulation = [&](int ranks, int shard_size, int expert, int stage) {
    RunSpec spec = on(ranks, expert, GetParam(), stage);
    spec.accumulation = 1;
    spec.shard_size = shard_size;
    return spec;
  };
  const RunResult expected = train_local(without_accumulation(4, 0, 1, 2));
  int layout = 0;
  for (const auto& [shard_size, expert] : {std::pair{1, 1}, {2, 1}, {2, 2}, {4, 2}}) {
    ++layout;
    for (const int stage : {2, 3})
      // Buckets that are under way between replicas while experts exchange tokens and counts, in backward
      // too.
      for (const bool overlap : {false, true}) {
        if (!to_run({2, 4, 2, 2}, {GetParam() == "bf16", layout - 1, stage - 2, overlap})) continue;
        RunSpec spec = without_accumulation(4, shard_size, expert, stage);
        spec.bucket = 500, spec.overlap = overlap;
        spec.recompute = overlap ? "full" : "none";
        expect_expert_bits(spec, expected);
      }
  }
}

/// Each rank sends its tokens to other experts than its neighbour: some have none for an expert that others
/// have, or for any of a rank.
TEST_P(ExpertEquality, WhereRanksHaveTokensForOtherExperts) {
  const auto skewed = [&](int ranks, int expert, const char* schedule) {
    RunSpec spec = on(ranks, expert, GetParam(), 3);
    spec.moe = R"("experts": 8, "top_k": 2, "ffn_hidden_size": 48, "router": "sigmoid", "bias_update": 1e-3)";
    spec.tied = false, spec.layers = 4;
    spec.accumulation = 2;
    spec.schedule = schedule;
    if (std::string(schedule) == "zero_bubble") spec.pipeline = 2, spec.ranks *= 2;
    spec.between_steps = [](Engine& engine) {
      for (const auto& [path, layer] : parallel::layers_of_experts(engine.module())) {
        std::vector<float> bias(8);
        const auto first = static_cast<std::size_t>(engine.data_ranks().rank() % 4 * 2);
        bias[first] = bias[first + 1] = 10;
        layer->restore(bias);
      }
    };
    return spec;
  };
  for (const int ranks : {2, 4}) {
    const RunResult expected = train_local(skewed(ranks, 1, "accumulate"));
    int layout = 0;
    for (const auto& [expert, schedule] :
         {std::pair{2, "accumulate"}, {ranks, "layered"}, {1, "zero_bubble"}, {2, "zero_bubble"}})
      if (to_run({2, 2, 4}, {GetParam() == "bf16", ranks / 4, layout++}))
        expect_expert_bits(skewed(ranks, expert, schedule), expected);
  }
}

TEST_P(ExpertEquality, OnEveryTier) {
  const RunResult expected = train_local(on(1, 1, GetParam(), 3));
  const TempFolder folder;
  int layout = 0;
  for (const auto& [ranks, expert] : {std::pair{1, 1}, {2, 1}, {2, 2}, {4, 2}}) {
    ++layout;
    for (const bool nvme : {false, true})
      for (const bool recompute : {false, true}) {
        if (!to_run({2, 4, 2, 2}, {GetParam() == "bf16", layout - 1, nvme, recompute})) continue;
        RunSpec spec = on(ranks, expert, GetParam(), 3);
        spec.offload_param = spec.offload_optimizer = nvme ? "nvme" : "cpu";
        spec.nvme_path = folder.path().string();
        spec.recompute = recompute ? "full" : "none";
        spec.prefetch = expert * 100000;
        expect_expert_bits(spec, expected);
      }
  }
}

/// Stages 0 and 1 reduce once; each pair of stages has its bits.
TEST_P(ExpertEquality, OverStages) {
  for (const int expert : {1, 2}) {
    const RunResult expected = train_local(on(2, expert, GetParam(), 0));
    RunSpec spec = on(2, expert, GetParam(), 1);
    spec.offload_optimizer = "cpu";
    expect_expert_bits(on(2, expert, GetParam(), 1), expected);
    expect_expert_bits(spec, expected);
  }
}

/// A run that goes on with experts shared out otherwise after each step, out of a checkpoint.
TEST_P(ExpertEquality, AlsoWhenTheLayoutChangesOnTheWay) {
  RunSpec whole = on(2, 1, GetParam(), 3);
  whole.steps = 6;
  const RunResult expected = train_local(whole);
  const TempFolder folder;
  std::vector<double> losses;
  RunResult got;
  for (const auto& [ranks, expert, stage, from, last] :
       {std::tuple{4, 2, 3, 0, 2}, {4, 4, 2, 2, 4}, {2, 1, 3, 4, 6}}) {
    RunSpec spec = on(ranks, expert, GetParam(), stage);
    spec.directory = folder.path().string();
    got = train_local(spec, from, last);
    losses.insert(losses.end(), got.losses.begin(), got.losses.end());
  }
  EXPECT_EQ(losses, expected.losses);
  EXPECT_TRUE(got.masters == expected.masters);
  EXPECT_TRUE(got.parameters == expected.parameters);
}

/// Pipelines, in any schedule, and layers in turn keep the bits too.
TEST_P(ExpertEquality, InEverySchedule) {
  const auto four_layers = [](RunSpec spec) {
    spec.layers = 4, spec.tied = false;
    spec.recompute = "full";
    return spec;
  };
  const RunResult expected = train_local(four_layers(on(1, 1, GetParam(), 3)));
  const TempFolder folder;
  for (const auto& [ranks, expert] : {std::pair{1, 1}, {2, 2}}) {
    RunSpec spec = four_layers(on(ranks, expert, GetParam(), 3));
    spec.schedule = "layered";
    expect_expert_bits(spec, expected);
    spec.offload_param = spec.offload_optimizer = "nvme";
    spec.nvme_path = folder.path().string();
    expect_expert_bits(spec, expected);
  }
  for (const char* schedule : {"1f1b", "gpipe", "zero_bubble"}) {
    RunSpec spec = four_layers(on(2, 2, GetParam(), 3));
    spec.ranks = 4, spec.pipeline = 2, spec.schedule = schedule;
    spec.recompute = "none";
    expect_expert_bits(spec, expected);
  }
}

/// Tensor and context ranks change the order of sums.
TEST_P(ExpertEquality, AgreesToRoundingOverTensorAndContextRanks) {
  const auto with_biases = [](RunSpec spec) {
    spec.dropout = 0;
    spec.moe += R"(, "capacity_factor": 1.0, "shared_experts": 1)";
    return spec;
  };
  const RunResult expected = train_local(with_biases(on(2, 1, GetParam(), 3)));
  const double tolerance = GetParam() == "fp32" ? 2e-5 : 0.02;
  for (const auto& [tensor, context, expert, sequence] : {std::tuple{2, 1, 1, true},
                                                          {2, 1, 2, true},
                                                          {2, 1, 2, false},
                                                          {1, 2, 2, true},
                                                          {1, 2, 4, true},
                                                          {2, 2, 2, true}}) {
    RunSpec spec = with_biases(on(2, expert, GetParam(), 3));
    spec.ranks = 2 * tensor * context, spec.tensor = tensor, spec.context = context;
    spec.sequence_parallel = sequence;
    const RunResult got = train_local(spec);
    for (std::size_t i = 0; i < expected.losses.size(); ++i) {
      EXPECT_NEAR(got.losses[i], expected.losses[i], tolerance) << expert_name(spec) << " tensor " << tensor;
      EXPECT_NEAR(got.norms[i] / expected.norms[i], 1, 10 * tolerance)
          << expert_name(spec) << " tensor " << tensor;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, ExpertEquality, ::testing::Values("fp32", "bf16"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace sherd::test

// Parameter groups leave runs equal to the bit: over stages, tiers and numbers of ranks, and over a
// checkpoint in the middle.
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;

/// By rate and decay, and by rule: one with a state less.
constexpr const char* two_rules =
    R"([{"match": ["*.bias", "*norm*"], "lr": 0.01}, {"match": ["blocks.1.*", "tokens.*"], "type": "SGD", "lr": 0.2, "momentum": 0.9},)"
    R"( {"match": "blocks.*.mlp.*", "weight_decay": 0.5, "lr": 0.001, "betas": [0.8, 0.9]}])";

RunSpec grouped(const std::string& dtype, int ranks, int stage) {
  RunSpec spec;
  spec.groups = two_rules;
  spec.dtype = dtype, spec.ranks = ranks, spec.stage = stage;
  spec.steps = 8;
  return spec;
}

class GroupsEquality : public ::testing::TestWithParam<std::string> {};

TEST_P(GroupsEquality, OverStagesAndTiers) {
  const TempFolder folder;
  const auto plain = train_local(grouped(GetParam(), 2, 0));
  RunSpec without = grouped(GetParam(), 2, 0);
  without.groups.clear();
  EXPECT_FALSE(train_local(without).bits() == plain.bits());
  struct Place {
    int stage;
    const char *parameters, *optimizer;
    std::string moments = "fp32";
  };
  for (const auto& [stage, parameters, optimizer, moments] :
       {Place{1, "none", "cpu"}, Place{2, "none", "nvme"}, Place{3, "none", "none"},
        Place{3, "nvme", "nvme"}}) {
    RunSpec spec = grouped(GetParam(), 2, stage);
    spec.offload_param = parameters, spec.offload_optimizer = optimizer;
    spec.nvme_path = folder.path().string(), spec.sub_group = 5000;
    EXPECT_TRUE(train_local(spec).bits() == plain.bits())
        << "stage " << stage << ", parameters " << parameters << ", optimizer " << optimizer;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupsEquality, ::testing::Values("fp32", "bf16"),
                         [](const auto& test) { return test.param; });

TEST(GroupsEqualityOf, MomentsIn16Bits) {
  RunSpec spec = grouped("bf16", 2, 0);
  spec.moments = "bf16";
  const auto plain = train_local(spec);
  spec.stage = 3, spec.offload_optimizer = "cpu";
  EXPECT_TRUE(train_local(spec).bits() == plain.bits());
}

/// On a GPU that does everything as late as it may, updates of several groups share no kernel.
TEST(GroupsEqualityOf, LazyGpus) {
  RunSpec spec = grouped("bf16", 1, 3);
  const auto plain = train_local(spec);
  spec.lazy = true;
  EXPECT_TRUE(train_local(spec).bits() == plain.bits());
  spec.offload_optimizer = "cpu";
  EXPECT_TRUE(train_local(spec).bits() == plain.bits());
}

/// A run that goes on with another number of ranks and another stage and tier, out of a checkpoint.
TEST(GroupsEqualityOf, ResumedRuns) {
  constexpr int micro_batches = 4;
  const TempFolder folder, nvme;
  const auto on = [&](int ranks, int stage, const std::string& optimizer = "none") {
    RunSpec spec = grouped("bf16", ranks, stage);
    spec.accumulation = micro_batches / ranks, spec.accumulate_in = "fp32";
    spec.offload_optimizer = optimizer, spec.nvme_path = nvme.path().string();
    spec.directory = folder.path().string();
    return spec;
  };
  const auto whole = train_local(on(2, 2));
  std::vector<double> losses;
  RunResult got;
  struct Part {
    int ranks, stage;
    const char* optimizer;
    int from, last;
  };
  for (const Part& part : {Part{4, 3, "none", 0, 3}, Part{1, 2, "nvme", 3, 5}, Part{2, 3, "cpu", 5, 8}}) {
    got = train_local(on(part.ranks, part.stage, part.optimizer), part.from, part.last);
    losses.insert(losses.end(), got.losses.begin(), got.losses.end());
  }
  EXPECT_EQ(losses, whole.losses);
  EXPECT_TRUE(got.masters == whole.masters);
  EXPECT_TRUE(got.parameters == whole.parameters);
}

}  // namespace
}  // namespace sherd::test

// Parameter groups by rate, decay and rule against plain PyTorch with param_groups
// (scripts/references/make_engine_reference.py), under every stage and tier.
#include <gtest/gtest.h>

#include "support/replayed.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;
using Overrides = std::vector<std::string>;

/// Where states lie, of every stage.
std::vector<Overrides> group_overrides(const std::string& nvme) {
  const std::string zero = "zero_optimization.";
  const auto offloaded = [&](const std::string& section, const std::string& device) {
    return cat(zero, section, R"(={"device": ")", device, "\"",
               device == "nvme" ? cat(R"(, "nvme_path": ")", nvme, "\"") : "", "}");
  };
  const std::string host = offloaded("offload_optimizer", "cpu"),
                    stored = offloaded("offload_optimizer", "nvme");
  const std::string all_sharded = zero + "stage3_param_persistence_threshold=0";
  std::vector<Overrides> out{{zero + "stage=0"}};
  for (const int stage : {1, 2, 3})
    for (const std::string& tier : {std::string(), host, stored}) {
      out.push_back({cat(zero, "stage=", stage), all_sharded});
      if (!tier.empty()) out.back().push_back(tier);
    }
  out.push_back({zero + "stage=3", all_sharded, stored, offloaded("offload_param", "nvme"),
                 zero + "sub_group_size=64"});
  return out;
}

class GroupsOracle : public ::testing::TestWithParam<replay::ReferenceRun> {};

TEST_P(GroupsOracle, TrainAsPyTorchReplaysThem) {
  const replay::ReferenceRun& run = GetParam();
  const replay::Reference reference("groups");
  const TempFolder nvme;
  for (const Overrides& overrides : group_overrides(nvme.path().string())) {
    SCOPED_TRACE(cat("with ", ::testing::PrintToString(overrides), ": ", run.config));
    const replay::Outcome outcome = replay::train(run, reference, overrides);
    EXPECT_EQ(replay::compare_steps(outcome.reports, reference.trace(run), 1e-6), std::nullopt);
    EXPECT_EQ(replay::compare_rates(outcome.reports, reference.rates(run)), std::nullopt);
    EXPECT_EQ(replay::compare_weights(run, reference, outcome.weights), std::nullopt);
  }
}

class LongOracle : public ::testing::TestWithParam<replay::ReferenceRun> {};

/// Adagrad as torch.optim has it, and Lion as DeepSpeed's CPU has it, with groups: no weight is off by 1e-6.
TEST_P(LongOracle, AgreesAfter50Steps) {
  const replay::ReferenceRun& run = GetParam();
  const replay::Reference reference("long");
  const TempFolder nvme;
  const std::vector<float> moved = reference.moved(run);
  for (const Overrides& overrides : group_overrides(nvme.path().string())) {
    SCOPED_TRACE(cat("with ", ::testing::PrintToString(overrides), ": ", run.config));
    const replay::Outcome outcome = replay::train(run, reference, overrides);
    ASSERT_EQ(outcome.reports.size(), 50u);
    EXPECT_EQ(replay::compare_steps(outcome.reports, reference.trace(run), 1e-5), std::nullopt);
    EXPECT_EQ(replay::compare_rates(outcome.reports, reference.rates(run)), std::nullopt);
    std::size_t at = 0;
    double most = 0;
    for (const auto& [name, weights] : outcome.weights) {
      const std::vector<float> initial = reference.initial(name);
      for (std::size_t i = 0; i < weights.size(); ++i)
        most = std::max(most, std::abs(static_cast<double>(weights[i]) - initial.at(i) - moved.at(at++)));
    }
    EXPECT_EQ(at, moved.size());
    EXPECT_LE(most, 1e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Runs, LongOracle, ::testing::ValuesIn(replay::read_runs("long")),
                         [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(Runs, GroupsOracle, ::testing::ValuesIn(replay::read_runs("groups")),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace sherd::test

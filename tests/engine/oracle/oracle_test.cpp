// Whole runs of the engine against plain PyTorch, which scripts/references/make_engine_reference.py had
// replay them: what each step reports, and where the weights end.
#include <gtest/gtest.h>

#include "support/replayed.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;
using Overrides = std::vector<std::string>;
const std::string zero = "zero_optimization.";

/// Stages and tiers whose gradients are reduced once per step, and those whose are with every micro-batch: a
/// run takes one of each.
std::vector<Overrides> settings_of(const replay::ReferenceRun& run, const std::string& nvme) {
  const auto offloaded = [&](const std::string& section, const std::string& device) {
    return cat(zero, section, R"(={"device": ")", device, "\"",
               device == "nvme" ? cat(R"(, "nvme_path": ")", nvme, "\"") : "", "}");
  };
  const std::string host_optimizer = offloaded("offload_optimizer", "cpu"),
                    host_parameters = offloaded("offload_param", "cpu");
  const std::string all_sharded = zero + "stage3_param_persistence_threshold=0";
  const Overrides once[] = {{zero + "stage=0"},
                            {zero + "stage=1"},
                            {zero + "stage=1", host_optimizer},
                            {zero + "stage=0", "training.recompute=\"selective\""}};
  const Overrides each_time[] = {
      {zero + "stage=2"},
      {zero + "stage=3", all_sharded},
      {zero + "stage=2", host_optimizer, zero + "reduce_bucket_size=100"},
      {zero + "stage=3", all_sharded, host_optimizer, host_parameters, "training.recompute=\"full\""},
      {zero + "stage=3", zero + "stage3_param_persistence_threshold=20", zero + "overlap_comm=true"},
      {zero + "stage=3", all_sharded, offloaded("offload_optimizer", "nvme"),
       offloaded("offload_param", "nvme")}};
  const auto index = static_cast<std::size_t>(run.index);
  return {once[index % std::size(once)], each_time[index % std::size(each_time)]};
}

/// Precision and number of ranks.
class Oracle : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(Oracle, RunsGoAsPyTorchReplaysThem) {
  const auto [precision, ranks] = GetParam();
  const replay::Reference reference("runs");
  const TempFolder nvme;
  const double tolerance = precision == "fp32" ? 1e-6 : 5e-3;
  int runs = 0;
  for (const replay::ReferenceRun& run : replay::read_runs("runs")) {
    if (!run.has(precision) || run.ranks != ranks) continue;
    ++runs;
    for (const Overrides& overrides : settings_of(run, nvme.path().string())) {
      SCOPED_TRACE(cat(run.name, " with ", ::testing::PrintToString(overrides), ": ", run.config));
      const replay::Outcome outcome = replay::train(run, reference, overrides);
      EXPECT_EQ(replay::compare_steps(outcome.reports, reference.trace(run), tolerance), std::nullopt);
      EXPECT_EQ(replay::compare_weights(run, reference, outcome.weights), std::nullopt);
    }
  }
  EXPECT_GE(runs, 10);
}

INSTANTIATE_TEST_SUITE_P(Runs, Oracle,
                         ::testing::Combine(::testing::Values("fp32", "bf16", "fp16"),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& test) {
                           return cat(std::get<0>(test.param), "_ranks", std::get<1>(test.param));
                         });

}  // namespace
}  // namespace sherd::test

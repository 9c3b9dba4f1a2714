// The same training on threads of one process and as MPI jobs gives the same bytes.
#include <gtest/gtest.h>

#include "support/equality_processes.h"
#include "support/full_suite.h"
#include "support/mpirun.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;

std::vector<unsigned char> run_under_mpi(const RunSpec& spec, const TempFolder& folder) {
  return run_processes({.launcher = sherd::testing::mpirun(spec.ranks)}, spec, folder);
}

class MpiEquality : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  /// Whether to run that one of a test's variants: every second unless all is asked for, so that each meets
  /// every dtype and every number of ranks.
  static bool chosen(int variant) {
    const auto& [dtype, ranks] = GetParam();
    return full_suite() || ((dtype == "bf16") + ranks / 2 + variant) % 2 == 0;
  }
};

TEST_P(MpiEquality, LocalAndMpiAgreeAtEveryStage) {
  if (!comm::mpi_available()) GTEST_SKIP() << "this build has no MPI";
  for (const int stage : {0, 1, 2, 3}) {
    if (!chosen(stage)) continue;
    RunSpec spec;
    std::tie(spec.dtype, spec.ranks) = GetParam();
    spec.stage = stage;
    if (stage == 3) {
      spec.prefetch = 20'000;
      spec.overlap = true;
      spec.recompute = "full";
      spec.bucket = 3000;
    }
    TempFolder folder;
    const auto local = train_local(spec).bits();
    if (stage == 3) spec.resume_at = 5;
    EXPECT_TRUE(run_under_mpi(spec, folder) == local) << "stage " << stage;
  }
}

TEST_P(MpiEquality, OffloadedRanksAgreeToo) {
  if (!comm::mpi_available()) GTEST_SKIP() << "this build has no MPI";
  RunSpec spec;
  std::tie(spec.dtype, spec.ranks) = GetParam();
  spec.stage = 3;
  const auto plain = train_local(spec).bits();
  TempFolder folder;
  spec.prefetch = 20'000, spec.overlap = true;
  spec.nvme_path = folder.path();
  spec.offload_optimizer = "nvme";
  for (const std::string param : {"cpu", "nvme"}) {
    if (!chosen(param == "nvme")) continue;
    spec.offload_param = param;
    EXPECT_TRUE(run_under_mpi(spec, folder) == plain) << "offload_param " << param;
  }
}

TEST_P(MpiEquality, ReplicasOfShardGroupsToo) {
  if (!comm::mpi_available()) GTEST_SKIP() << "this build has no MPI";
  RunSpec spec;
  std::tie(spec.dtype, spec.ranks) = GetParam();
  spec.shard_size = spec.ranks / 2;
  spec.steps = 6;
  for (const int accumulation : {1, 2}) {
    if (!chosen(accumulation)) continue;
    spec.stage = accumulation + 1, spec.accumulation = accumulation;
    spec.overlap = accumulation == 2, spec.bucket = 900;
    TempFolder folder;
    EXPECT_TRUE(run_under_mpi(spec, folder) == train_local(spec).bits()) << accumulation << " micro-batches";
  }
}

INSTANTIATE_TEST_SUITE_P(All, MpiEquality,
                         ::testing::Combine(::testing::Values("bf16", "fp32"), ::testing::Values(2, 4)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" + std::to_string(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace sherd::test

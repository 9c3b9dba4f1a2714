// Ranks that are processes, with tensors on GPUs: the conformance suite by both launchers, and what must
// happen when one of them dies. They run test_comm_processes, with SHERD_TEST_GPU in their environment.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "support/gpu/gpu.h"
#include "support/mpirun.h"
#include "support/places.h"

namespace sherd::comm {
namespace {

/// The folder tests/ of the checkout: SHERD_TEST_SOURCE says where it is on a machine that did not compile.
std::string tests() {
  const char* elsewhere = std::getenv("SHERD_TEST_SOURCE");
  return cat(elsewhere ? elsewhere : SHERD_SOURCE_DIR, "/tests");
}
std::string launch(int ranks) {
  return cat(tests(), "/support/launch.sh ", ranks, ' ');
}
/// Runs the processes, which `words` start, of the program that lies beside this one.
void expect_success(const std::string& words, const std::string& arguments = "") {
  const std::filesystem::path here = std::filesystem::canonical("/proc/self/exe").parent_path();
  const std::string command = cat("SHERD_TEST_GPU=1 timeout 90 ", words,
                                  (here / "comm/test_comm_processes").string(), ' ', arguments);
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

class GpuProcesses : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { SHERD_NEEDS_GPU(); }
};

TEST_P(GpuProcesses, ConformOverTcp) {
  expect_success(launch(2), cat("--gtest_filter=Processes/*/", GetParam()));
}

TEST_P(GpuProcesses, ConformOverMpi) {
#ifdef SHERD_TEST_WITHOUT_MPI
  GTEST_SKIP() << "this build has no MPI";
#else
  expect_success(sherd::testing::mpirun(2), cat("--gtest_filter=Processes/*/", GetParam()));
#endif
}

INSTANTIATE_TEST_SUITE_P(Exchange, GpuProcesses, ::testing::Values("windows", "messages"),
                         [](const auto& test) { return std::string(test.param); });

class GpuDeath : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { SHERD_NEEDS_GPU(); }
};

TEST_P(GpuDeath, IsNamedByTheOthers) {
  expect_success(cat(tests(), "/comm/death.sh 3 ", GetParam(), ' ', launch(3)));
}

INSTANTIATE_TEST_SUITE_P(Of, GpuDeath,
                         ::testing::Values("Kill", "KillAsync", "KillAllocate", "KillMessages",
                                           "KillReceive"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace sherd::comm

// Tensor and context ranks give the same bits whatever they exchange over: threads of one process, MPI or
// TCP, with shared memory, by messages, or on several machines.
#include <gtest/gtest.h>

#include <iterator>

#include "comm/communicator.h"
#include "support/equality_processes.h"
#include "support/full_suite.h"
#include "support/mpirun.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;

struct ProcessLayout {
  const char* name;
  int tensor, context;
  const char* method = "ring";
};
constexpr ProcessLayout process_layouts[] = {
    {"tensor2", 2, 1}, {"ring2", 1, 2}, {"ulysses2", 1, 2, "ulysses"}, {"tensor2_ring2", 2, 2}};

struct ProcessVariant {
  const char* name;
  bool mpi, shared_memory;
  const char* machines = "";  ///< the machines of four ranks; two ranks take the first two
};
constexpr ProcessVariant process_variants[] = {{"mpi", true, true},
                                               {"mpi_messages", true, false},
                                               {"tcp", false, true},
                                               {"tcp_messages", false, false},
                                               // Tensor ranks share a machine, context ranks do not.
                                               {"tcp_pairs", false, true, "0011"},
                                               // Tensor ranks are on two machines, context ranks on one.
                                               {"tcp_interleaved", false, true, "0101"}};

RunSpec spec_of(const ProcessLayout& layout, int stage) {
  RunSpec spec;
  spec.tensor = layout.tensor, spec.context = layout.context, spec.context_method = layout.method;
  spec.ranks = layout.tensor * layout.context;
  spec.dtype = stage == 2 ? "fp32" : "bf16";
  spec.stage = stage;
  spec.overlap = stage == 3, spec.bucket = stage == 3 ? 3000 : spec.bucket;
  spec.layers = 2, spec.steps = 4;
  return spec;
}

class ParallelProcesses : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ParallelProcesses, HaveTheBitsOfThreads) {
  const auto [place, kind] = GetParam();
  const ProcessLayout& layout = process_layouts[place];
  const ProcessVariant& variant = process_variants[kind];
  if (variant.mpi && !comm::mpi_available()) GTEST_SKIP() << "this build has no MPI";
  for (int stage = 0; stage < 4; ++stage) {
    // Unless all is asked for one of each, so that each layout and each way meets several.
    if (!full_suite() && (place + kind) % 4 != stage) continue;
    const RunSpec spec = spec_of(layout, stage);
    const RunResult local = train_local(spec);
    ASSERT_NE(local.losses.front(), local.losses.back());
    const Processes how{
        .launcher = variant.mpi ? sherd::testing::mpirun(spec.ranks) : tcp_launcher(spec.ranks),
        .shared_memory = variant.shared_memory,
        .machines = variant.machines};
    const TempFolder folder;
    EXPECT_TRUE(run_processes(how, spec, folder) == local.bits()) << "stage " << stage;
  }
}

/// All ways with four ranks; with two, each way once.
std::vector<std::tuple<int, int>> chosen() {
  std::vector<std::tuple<int, int>> out;
  for (int layout = 0; layout < std::ssize(process_layouts); ++layout)
    for (int variant = 0; variant < std::ssize(process_variants); ++variant) {
      const bool two = process_layouts[layout].tensor * process_layouts[layout].context == 2;
      if (two && std::string(process_variants[variant].machines) == "0011")
        continue;  // both on one machine: as "tcp"
      if (!two || full_suite() || variant % 3 == layout) out.emplace_back(layout, variant);
    }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Over, ParallelProcesses, ::testing::ValuesIn(chosen()), [](const auto& test) {
  return cat(process_layouts[std::get<0>(test.param)].name, "_over_",
             process_variants[std::get<1>(test.param)].name);
});

}  // namespace
}  // namespace sherd::test

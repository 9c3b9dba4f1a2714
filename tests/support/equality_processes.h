#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "support/equality.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::test {

/// How processes are started, and by which ways they exchange.
struct Processes {
  std::string launcher;  ///< the start of a command line that runs a program on all ranks
  bool shared_memory = true;
  std::string machines{};  ///< a digit for each rank: the machine that it takes itself to be on; empty: this
};

/// As torchrun does.
inline std::string tcp_launcher(int ranks) {
  return cat(SHERD_SOURCE_DIR "/tests/support/launch.sh ", ranks, ' ');
}

/// A shell's command line for a run on the ranks of a launcher, whose bits go to `output`. Not all settings
/// of a RunSpec go there: see the body.
inline std::string processes_command(const Processes& how, const RunSpec& spec, const std::string& output,
                                     const testing::TempFolder& folder) {
  std::string command =
      cat("timeout 200 ", how.launcher, SHERD_EQUALITY_RUNNER " ", output, " ranks=", spec.ranks,
          " stage=", spec.stage, " dtype=", spec.dtype, " layers=", spec.layers, " steps=", spec.steps,
          " accumulation=", spec.accumulation, " shard_size=", spec.shard_size, " tensor=", spec.tensor,
          " context=", spec.context, " sequence_parallel=", spec.sequence_parallel ? 1 : 0,
          " context_method=", spec.context_method, " bucket=", spec.bucket, " prefetch=", spec.prefetch,
          " persistence=", spec.persistence, " overlap=", spec.overlap ? 1 : 0, " recompute=", spec.recompute,
          " shared_memory=", how.shared_memory ? 1 : 0, " pipeline=", spec.pipeline,
          " virtual_stages=", spec.virtual_stages, " tied=", spec.tied ? 1 : 0);
  if (!spec.schedule.empty()) command += cat(" schedule=", spec.schedule);
  if (!how.machines.empty()) command += cat(" machines=", how.machines);
  if (!spec.nvme_path.empty())
    command += cat(" offload_param=", spec.offload_param, " offload_optimizer=", spec.offload_optimizer,
                   " nvme_path=", spec.nvme_path, " max_in_cpu=0");
  if (spec.resume_at)
    command += cat(" resume_at=", spec.resume_at, " directory=", (folder / "checkpoint").string());
  return command;
}

/// The bits of a run on the ranks of a launcher.
inline std::vector<unsigned char> run_processes(const Processes& how, const RunSpec& spec,
                                                const testing::TempFolder& folder) {
  const std::string output = (folder / "bits").string();
  const std::string command = processes_command(how, spec, output, folder);
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  std::ifstream in(output, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  const auto* begin = reinterpret_cast<const unsigned char*>(bytes.data());
  return {begin, begin + bytes.size()};
}

}  // namespace sherd::test

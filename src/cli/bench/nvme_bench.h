#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "cli/bench/bench_report.h"
#include "cli/bench/rounds.h"
#include "offload/store.h"

namespace sherd::cli {

struct NvmeBenchOptions {
  std::filesystem::path folder;                    ///< must exist
  std::uint64_t bytes = std::uint64_t{512} << 20;  ///< of the file, and of each timed run
  int rounds = 5;
  /// All combinations are measured.
  std::vector<std::int64_t> block_sizes{1 << 20}, queue_depths{8};
  int thread_count = 2;
  offload::StoreOptions::Backend backend = offload::StoreOptions::Backend::automatic;
};

/// Reads, writes and both at once through the offload store, beside the same requests without it, on one file
/// in folder/sherd-bench, which goes again. Throws Error{config} where the folder is missing or has no room,
/// Error{interrupted} once `stopped` says so, between two runs.
BenchReport measure_nvme(const NvmeBenchOptions& options, const std::function<bool()>& stopped,
                         const Tell& tell);

}  // namespace sherd::cli

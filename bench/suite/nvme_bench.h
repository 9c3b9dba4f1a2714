#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "bench/suite/bench_report.h"
#include "bench/suite/rounds.h"
#include "offload/store.h"

namespace sherd::bench {

struct NvmeBenchOptions {
  std::filesystem::path folder;                    ///< must exist
  std::uint64_t bytes = std::uint64_t{512} << 20;  ///< size of the file, and of each timed run
  int rounds = 5;
  /// All combinations are measured.
  std::vector<std::int64_t> block_sizes{1 << 20}, queue_depths{8};
  std::vector<offload::StoreOptions::Backend> backends{offload::StoreOptions::Backend::automatic};
  std::vector<std::int64_t> thread_counts{1};  ///< numbers of threads, with backend threads
};

/// Reads, writes and both at once through the offload store, beside the same requests without it, on one file
/// in folder/sherd-bench, which goes again. Throws Error{config} where the folder is missing or has no room
/// and for what no store accepts, Error{interrupted} once `stopped` says so, between two runs.
BenchReport measure_nvme(const NvmeBenchOptions& options, const std::function<bool()>& stopped,
                         const Tell& tell);

}  // namespace sherd::bench

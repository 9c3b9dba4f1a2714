#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "bench/suite/rounds.h"
#include "config/machine.h"

namespace sherd::bench {

struct MachineBenchOptions {
  bool gpus = false;               ///< measures the GPUs here, else the processor
  int cores = 1;                   ///< shared by the ranks
  int steps = 3;                   ///< that are measured of each model
  std::int64_t width = 1024;       ///< wider models are left out
  std::filesystem::path folder{};  ///< on the drive to be measured; empty: none
};

/// Bytes of this machine's memory that it takes at most.
double machine_bench_memory(const MachineBenchOptions& options);

/// The rates of this machine's GPUs, or of its processor: of one rank with all cores, and of as many ranks as
/// there are cores. Small transformers train on it, in GPT-2's and Llama's style and both types, and every
/// kernel of theirs is timed where it runs in training, with what the caches then hold (on a GPU each is
/// waited for, and what the wait takes is taken off); collectives, the update, copies and the drive are
/// measured beside. Takes about a minute. Throws Error{interrupted} once `stopped` says so.
config::Machine measure_machine(const MachineBenchOptions& options, const std::function<bool()>& stopped,
                                const Tell& tell);

}  // namespace sherd::bench

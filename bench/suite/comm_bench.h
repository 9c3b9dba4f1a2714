#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "bench/suite/bench_report.h"
#include "bench/suite/rounds.h"
#include "comm/communicator.h"

namespace sherd::bench {

/// One rank's fp32 tensors: `full` and `other` of size · shard elements, and a `shard`.
struct CollectiveBuffers {
  tensor::Tensor full, shard, other;
};

struct CommBenchOptions {
  std::size_t bytes = std::size_t{64} << 20;  ///< size of the full tensor
  int rounds = 15;
  /// Measures, as *_staged, also tensors in memory that other ranks do not reach.
  bool staged = false;
  /// More to measure in the same rounds, on buffers of memory that other ranks do not reach.
  std::function<std::vector<Contender>(const CollectiveBuffers&)> others{};
};

/// The bytes that each rank allocates.
double comm_bench_memory(const CommBenchOptions& options, int ranks);

/// All-reduce, reduce-scatter, all-gather and, between several ranks, a send and a receive beside a memcpy of
/// as many bytes by every rank at once, in alternating rounds. Collective; every rank gets its own times.
Rounds measure_collectives(comm::Communicator& comm, const CommBenchOptions& options, const Tell& tell);

/// Microseconds per barrier. Collective.
double measure_barrier(comm::Communicator& comm);

/// One row for each of measure_collectives()'s own contenders.
BenchReport comm_report(const Rounds& times, const CommBenchOptions& options, const std::string& backend,
                        int ranks, double barrier_us);

}  // namespace sherd::bench

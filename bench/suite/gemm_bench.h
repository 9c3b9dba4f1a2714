#pragma once

#include <cstdint>
#include <string>

#include "bench/suite/bench_report.h"
#include "bench/suite/rounds.h"

namespace sherd::bench {

struct GemmBenchOptions {
  int threads = 1, rounds = 5;
  /// The shape of a GPT-2-like transformer: rows of every product, width, size of the vocabulary.
  std::int64_t tokens = 2048, hidden = 768, vocabulary = 50257;
  std::string only;  ///< cases whose name holds this text; empty: all
};

/// The largest memory that one of its cases takes, in bytes.
double gemm_bench_memory(const GemmBenchOptions& options);

/// The products of a transformer's forward and backward pass and its attention, bf16 and fp32, each beside
/// the register peak of its dtype. With one thread its CPU time is taken. Throws Error{usage} when no case
/// matches `only`.
BenchReport measure_gemm(const GemmBenchOptions& options, const Tell& tell);

}  // namespace sherd::bench

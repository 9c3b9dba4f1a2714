#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/suite/bench_report.h"
#include "bench/suite/limits.h"
#include "bench/suite/rounds.h"
#include "optim/update_rule.h"
#include "tensor/kernels.h"

namespace sherd::bench {

/// An AdamW step over some layout of state, or a pass of 1-bit Adam's.
struct AdamCase {
  std::string name, what;
  int bytes = 0;  ///< per parameter, read and written
  std::function<void()> run;
};

/// AdamW steps over all layouts of state that a configuration can ask for, and the streaming limit, on memory
/// of their own.
class AdamBench {
 public:
  /// `parameters` must be a positive multiple of 64.
  AdamBench(std::int64_t parameters, int threads);

  /// The first is the limit.
  const std::vector<AdamCase>& cases() const { return cases_; }
  std::int64_t parameters() const { return n_; }
  const OptimizerStreams& streams() const { return streams_; }
  /// body(begin, end) over all elements, on all threads.
  void each(const std::function<void(std::int64_t, std::int64_t)>& body);

  /// The bytes that it allocates for each parameter.
  static constexpr int memory_per_parameter = 36;

 private:
  enum class Masters { fp32, split };
  tensor::Tensor make(DType dtype, double value);
  optim::SpanUpdate span(DType grad, Masters masters, DType moments) const;
  void fused(const optim::SpanUpdate& span);
  void norm_and_fused(optim::SpanUpdate span);
  void pack_momentum();
  void update_by_momentum();
  void add_cases();

  std::int64_t n_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  tensor::Tensor p_, m_, v_, g_, p16_, g16_, high_, low_, m16_, v16_;
  tensor::Tensor codes_, scales_;  ///< both moments in 8 bits, one behind the other
  tensor::Tensor error_, signs_;   ///< momentum that travels as one bit
  float scale_ = 0;
  OptimizerStreams streams_{};
  optim::Hyper hyper_;
  std::int64_t step_ = 0;
  std::vector<AdamCase> cases_;
};

/// Runs all cases in alternating rounds.
BenchReport measure_adam(std::int64_t parameters, int threads, int rounds, const Tell& tell);

}  // namespace sherd::bench

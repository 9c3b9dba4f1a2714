#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "tensor/kernels.h"

namespace sherd::engine {

/// The fastest rate, in FLOP/s, at which `kernels` multiplied matrices of `dtype` during about `seconds`:
/// 1024 rows through a 768 × 3072 weight, as in a transformer's MLP; the best product after a warm-up.
double measure_gemm_rate(tensor::Kernels& kernels, DType dtype, double seconds);

/// ${XDG_CACHE_HOME:-~/.cache}/sherd; nothing when neither variable names an absolute path.
std::optional<std::filesystem::path> default_cache_folder();

/// "AMD EPYC …" as /proc/cpuinfo has it; "unknown" elsewhere.
std::string cpu_model();

struct GemmProbe {
  double seconds = 0.1;  ///< how long to measure
  /// Where rates are kept; nothing: measure every time.
  std::optional<std::filesystem::path> cache_folder = default_cache_folder();
  /// How many calls are measured, of which the fastest counts: a single one was perhaps taken on a busy
  /// machine. Later calls measure nothing.
  int rounds = 5;
  /// Measure once more even so.
  bool refresh = false;
  /// The rate that a run was seen to reach, in FLOP/s: a kept rate below it is measured again, and never
  /// stays below it.
  double reached = 0;
};

struct GemmRate {
  double flops_per_second = 0;
  bool cached = false;  ///< an earlier call's, not measured now or slower now
};

/// The rate that `threads` threads of this machine reach: the denominator of MFU. The fastest of several
/// calls' measurements, kept on disk by processor, threads, dtype, instruction set and the versions of Sherd
/// and its library. A cache that is damaged is measured anew, one that cannot be written is done without.
GemmRate gemm_rate(int threads, DType dtype, const GemmProbe& probe = {});

}  // namespace sherd::engine

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
  double seconds = 0.3;  ///< how long to measure
  /// Where rates are kept; nothing: measure every time.
  std::optional<std::filesystem::path> cache_folder = default_cache_folder();
  /// Measure though a rate is kept, and keep the faster one: the first was perhaps taken on a busy machine.
  bool refresh = false;
};

struct GemmRate {
  double flops_per_second = 0;
  bool cached = false;  ///< read, not measured now
};

/// What `threads` threads of this machine reach: the denominator of MFU. Kept on disk by processor, threads,
/// dtype, instruction set and the versions of Sherd and its library. A cache that is damaged is measured
/// anew, one that cannot be written is done without.
GemmRate gemm_rate(int threads, DType dtype, const GemmProbe& probe = {});

}  // namespace sherd::engine

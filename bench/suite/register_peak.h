#pragma once

#include <cstdint>
#include <string>

#include "base/arena.h"
#include "base/dtype.h"

namespace sherd::bench {

/// A loop of multiply-adds in registers, as wide as the processor can for products of a dtype: what no matrix
/// product of that dtype can exceed.
struct RegisterPeak {
  void (*loop)(std::int64_t turns) = nullptr;  ///< null where none is known for this processor
  double flops = 0;                            ///< per turn
  std::string name;                            ///< of the instruction: "AVX-512 fp32 FMA"
};
/// Follows DNNL_MAX_CPU_ISA, as the products do. bf16 where the processor has no bf16 products: that of fp32.
RegisterPeak register_peak(DType dtype);

/// Runs the loop on all threads of the arena, for about `flops` operations, and returns how many they were.
double run_peak(const RegisterPeak& peak, Arena& arena, double flops);

}  // namespace sherd::bench

#pragma once

#include <cstdint>
#include <string>

#include "base/arena.h"
#include "base/dtype.h"

// The limits of a machine, measured by loops of its own: the operations of its registers, and the bytes of
// its memory.
namespace sherd::bench {

/// A loop of multiply-adds in registers, as wide as the processor can for products of a dtype. No matrix
/// product of that dtype is faster.
struct RegisterPeak {
  void (*loop)(std::int64_t turns) = nullptr;  ///< null where none is known for this processor
  double flops = 0;                            ///< per turn
  std::string name;                            ///< the instruction's name: "AVX-512 fp32 FMA"
};
/// Follows DNNL_MAX_CPU_ISA, as the products do. bf16 where the processor has no bf16 products: that of fp32.
RegisterPeak register_peak(DType dtype);

/// Runs the loop on all threads of the arena, for about `flops` operations, and returns how many they were.
double run_peak(const RegisterPeak& peak, Arena& arena, double flops);

/// The fp32 streams of an optimizer step, and 16-bit ones.
struct OptimizerStreams {
  float *p, *m, *v, *g;
  std::uint16_t *p16, *g16;
};

/// Bytes per element that move_streams() reads and writes.
inline constexpr int streamed_bytes = 30;

/// The streaming limit of a fused step: over [begin, end), a multiple of 64 elements from a multiple of 64,
/// reads p, m, v, g and writes p, m, v and (past the caches) p16 with software prefetch and next to no
/// arithmetic. The widest vectors of the processor are chosen at run time.
void move_streams(const OptimizerStreams& s, std::int64_t begin, std::int64_t end);

}  // namespace sherd::bench

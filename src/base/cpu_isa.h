#pragma once

#include <string_view>

namespace sherd {

/// The instruction sets for which sherd_isa_sources() compiles kernels, weakest first.
enum class CpuIsa { portable, avx2, avx512 };

/// The strongest one that this processor has and that the environment allows: DNNL_MAX_CPU_ISA (oneDNN's own
/// variable: SSE41, AVX, AVX2, AVX512_…) caps Sherd's kernels too, so one variable selects one code path.
CpuIsa cpu_isa();

std::string_view name_of(CpuIsa isa);

/// True when products of bf16 matrices run in hardware (AVX512-BF16 or AMX) and oneDNN may use it.
bool cpu_has_bf16_products();

/// True when they run on tiles (AMX), for which this asks the system once.
bool cpu_has_bf16_tiles();

}  // namespace sherd

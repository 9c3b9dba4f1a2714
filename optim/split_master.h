#pragma once

#include <cstdint>

#include "base/arena.h"
#include "base/cpu_isa.h"
#include "base/dtype.h"

namespace sherd::optim {

/// Split masters: the bf16 parameter is the high half of the fp32 master p, so that the optimizer keeps only
/// the 16 low bits beside it. With u the 32 bits of p,
///
///     high = (u + 0x8000) >> 16   (round_master_to_bf16(p): to nearest, ties away from zero),
///     low  = u & 0xffff,
///     u    = ((high − (low ≥ 0x8000)) << 16) | low,   all modulo 2¹⁶ and 2³².
///
/// Every bit pattern comes back, also those of infinities and NaNs. (A lossless form of the split of Zamirai
/// et al., "Revisiting BFloat16 training", 2020.) The memory of `high`, `low` and `master` must not overlap.

/// Writes the two halves of n fp32 masters; `high` holds n bf16.
void split_master(const float* master, void* high, std::uint16_t* low, std::int64_t n, Arena& arena,
                  CpuIsa isa = cpu_isa());

/// Rebuilds n fp32 masters, to the bit.
void join_master(const void* high, const std::uint16_t* low, float* master, std::int64_t n, Arena& arena,
                 CpuIsa isa = cpu_isa());

/// Rounds n fp32 masters to `dtype`: bf16 to nearest with ties away from zero, fp16 to nearest even, fp32 as
/// is.
void round_masters(const float* master, void* to, DType dtype, std::int64_t n, Arena& arena);

}  // namespace sherd::optim

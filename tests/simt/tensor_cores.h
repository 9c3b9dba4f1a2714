#pragma once

#include <cstdint>

// A warp's tensor cores, by lanes that exchange what they hold. To be called by kernels only.

namespace sherd::simt {

/// mma.m16n8k16: a lane's part of d += a·b, summed in fp32 with k ascending. `widen` makes a number of an
/// element's bits.
void multiply_fragments(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                        float (*widen)(std::uint16_t));
/// ldmatrix.x4, of the row of eight elements that this lane has read.
void deal_matrices(unsigned (&to)[4], const std::uint64_t (&row)[2], bool transposed);

}  // namespace sherd::simt

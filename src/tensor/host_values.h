#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace sherd::tensor {

/// Converts `to.size()` / size_of(to_dtype) floating values in the processor's memory, rounding to nearest
/// once (fp64 through fp32, as PyTorch does). fp32, bf16, fp16 and fp64, at any address; the two may not
/// overlap. On the calling thread.
void convert_values(std::span<const std::byte> from, DType from_dtype, std::span<std::byte> to,
                    DType to_dtype);

/// Turns a matrix of `rows` rows of `columns` elements of `size` bytes: to[c, r] = from[r, c].
void transpose_values(const std::byte* from, std::int64_t rows, std::int64_t columns, std::size_t size,
                      std::byte* to);

}  // namespace sherd::tensor

#pragma once

#include "device/cuda/target.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {

/// Packed projections by kind, [Q | K | V], from those by group (tensor::Attention), or with `by_group` back:
/// `rows` rows of elements of two bytes, whose heads are multiples of 16 bytes. So one stride leads from
/// query head to query head. `from` and `to` do not overlap, and begin at multiples of 16 bytes.
void regroup_heads(const device::SHERD_CUDA::Target& target, const AttentionExtents& e, const void* from,
                   void* to, std::int64_t rows, bool by_group);

}  // namespace sherd::tensor::SHERD_CUDA

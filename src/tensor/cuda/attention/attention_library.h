#pragma once

#include <memory>

#include "device/cuda/target.h"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {

/// The tensors of one call of attention; those of the gradient are undefined in the forward pass.
struct AttentionCall {
  const AttentionExtents& extents;
  const Attention& geometry;
  const Tensor &qkv, &out, &lse;
  Tensor dout{}, dqkv{};
};

/// A library's attention, to be tried before the own kernels. Each function returns false, having done
/// nothing, where the library does not take the call.
class AttentionLibrary {
 public:
  virtual ~AttentionLibrary() = default;
  virtual bool forward(const AttentionCall& call) = 0;
  virtual bool backward(const AttentionCall& call, bool deterministic) = 0;
};

/// cuDNN's attention, which deferred calls may keep alive. One that takes no call in a build without cuDNN
/// (cudnn/stub), or where it cannot be loaded.
std::shared_ptr<AttentionLibrary> make_attention_library(const device::SHERD_CUDA::Target& target);

/// Packed projections by kind, [Q | K | V], from those by group (tensor::Attention), or with `by_group` back:
/// `rows` rows of elements of two bytes, whose heads are multiples of 16 bytes. So one stride leads from
/// query head to query head. `from` and `to` do not overlap, and begin at multiples of 16 bytes.
void regroup_heads(const device::SHERD_CUDA::Target& target, const AttentionExtents& e, const void* from,
                   void* to, std::int64_t rows, bool by_group);

}  // namespace sherd::tensor::SHERD_CUDA

#pragma once

#include <array>

#include "comm/communicator.h"
#include "tensor/kernels.h"

namespace sherd::parallel {

using tensor::Tensor;

/// The result of ring_attention(), and what its gradient needs.
struct RingResult {
  Tensor out;                 ///< [batch, rows, heads·head_dim]
  std::array<Tensor, 2> lse;  ///< by chunk of queries: [batch, heads, rows/2], compute type
};

/// Ring attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers"), without a tape. Of every
/// sequence each of c ranks has two chunks, r and 2c − 1 − r of 2c (ContextMethod::ring), as packed qkv
/// [batch, rows, width]. Keys and values go around the ranks: while a rank attends to those that it has,
/// chunk by chunk, the next ones are under way; results are merged by their log-sum-exp in the compute type
/// and round once more. Chunks that a causal mask hides are left out, which leaves all ranks the same work,
/// and so are those that lie before all windows.
///
/// A rank sends c − 1 blocks of keys and values, its share of them, and never has more than two.
/// geometry.scores: which heads these are, and how long sequences are. sinks: undefined, or what
/// tensor::Kernels::attention_sinks() takes. All ranks call alike. Throws Error{usage} for odd rows,
/// Error{comm} as communicators do.
RingResult ring_attention(tensor::Kernels& kernels, comm::Communicator& ranks, const Tensor& qkv,
                          const tensor::Attention& geometry, const Tensor& sinks = {});

/// The gradient of qkv. Keys and values go around again, and their gradients with them, in the compute type,
/// until they are back after c hops; those of queries gather in the compute type. Both round once.
Tensor ring_attention_backward(tensor::Kernels& kernels, comm::Communicator& ranks, const Tensor& qkv,
                               const tensor::Attention& geometry, const RingResult& result,
                               const Tensor& dout);
/// This rank's part of the gradient of sinks: dsinks (+)= it.
void ring_sinks_backward(tensor::Kernels& kernels, comm::Communicator& ranks, const Tensor& qkv,
                         const tensor::Attention& geometry, const Tensor& sinks, const RingResult& result,
                         const Tensor& dout, const Tensor& dsinks, bool accumulate);

}  // namespace sherd::parallel

#pragma once

#include "tensor/cuda/attention/attention.cuh"

namespace sherd::tensor::SHERD_CUDA {

/// The kernels of attention by tensor cores (attention_mma.cu), for bf16 and f16: the forward pass, and the
/// gradients of queries and of keys and values. Their work is cut into tiles of `mma_tile` queries, or keys.
enum class MmaKernel : std::uint8_t { forward, dq, dkv };
inline constexpr int mma_tile = 64;

/// Whether they take this call: heads of up to 128 elements in steps of 16, aligned to 16 bytes, and where
/// the GPU's blocks have the shared memory.
template <class S>
bool mma_takes(const Target& target, const AttentionArguments<S>& a);

/// Queues one, for tiles of `parts` by so many blocks.
template <class S, class Parts>
void launch_mma(MmaKernel kernel, const Target& target, const AttentionArguments<S>& a, const Parts& parts,
                unsigned blocks);

}  // namespace sherd::tensor::SHERD_CUDA

#pragma once

#include <cstdint>

#include "optim/device_update.h"
#include "tensor/exact_sum.h"
#include "tensor/kernels.h"

// Momentum that replicas exchange as one bit per element (Tang et al., "1-bit Adam: communication efficient
// large-scale training with Adam's convergence speed", 2021). A run of elements travels as signs and one
// scale, ‖x‖/√n, and what that leaves out, the error, is added to what travels next. Signs are words of 64:
// bit i is 1 where element i is negative, and what fills up the last word is not. Spans cut at multiples of
// 64, threads, instruction sets and GPUs give the same bits. What takes an Arena is done by the processor;
// what takes Kernels, or a Device, where the memory is: a GPU's is queued, and waited for where there are
// sums.

namespace sherd::optim {

/// Elements whose signs make a word.
inline constexpr std::int64_t signs_per_word = 64;

/// A run of elements whose momentum is to travel.
struct MomentumSpan {
  const void* grad = nullptr;
  DType grad_dtype = DType::f32;  ///< f32, bf16 or f16
  double grad_factor = 1;
  double beta1 = 0.9;
  const float* momentum = nullptr;  ///< as the step before left it
  float* error = nullptr;
  std::uint64_t* signs = nullptr;
  std::int64_t n = 0;
};

/// error ← β1·momentum + (1−β1)·grad·factor + error, what is to travel, and its signs. Adds its squares to
/// `squares`. settle_error() takes away what did travel.
void compress_momentum(const MomentumSpan& span, Arena& arena, tensor::ExactSum& squares,
                       CpuIsa isa = cpu_isa());
void compress_momentum(const MomentumSpan& span, tensor::Kernels& kernels, tensor::ExactSum& squares);

/// A run as replicas have sent it: the first one's signs and scale, and those of the others `stride` bytes
/// after each other.
struct SentMomentum {
  const std::uint64_t* signs = nullptr;
  const float* scale = nullptr;
  std::int64_t stride = 0;
  int replicas = 0;
};

/// Adds up a run that replicas have sent, on the replica that serves it: error ← error + mean over replicas
/// of ±scale, in their order; `result`: the signs of that. Adds its squares to `squares`.
void average_momentum(const SentMomentum& sent, float* error, std::uint64_t* result, std::int64_t n,
                      Arena& arena, tensor::ExactSum& squares, CpuIsa isa = cpu_isa());
void average_momentum(const SentMomentum& sent, float* error, std::uint64_t* result, std::int64_t n,
                      tensor::Kernels& kernels, tensor::ExactSum& squares);

/// ‖x‖/√n.
float one_bit_scale(const tensor::ExactSum& squares, std::int64_t n);

/// error ← error − scale·sign(error): what has travelled is no error.
void settle_error(float* error, float scale, std::int64_t n, Arena& arena);
void settle_error(float* error, float scale, std::int64_t n, device::Device& device);

/// The momentum that replicas agreed on for a run, or for a part of it: one that begins at a multiple of 64,
/// or within a word of signs, by whose end it then ends.
struct AgreedMomentum {
  const std::uint64_t* signs = nullptr;
  float scale = 0;
  float* error = nullptr;  ///< this replica's, which settles: where `settled` travelled
  float settled = 0;
  int first_bit = 0;  ///< the first element's in `signs`; refresh_variance() alone takes another than 0
};

/// From element `begin` of it on, a multiple of 64.
AgreedMomentum part_of(const AgreedMomentum& momentum, std::int64_t begin);

/// update() by the momentum that replicas agreed on, in place of a gradient (OneBitAdam behind its
/// freeze_step): `span` has no gradient and fp32 moments. Where the variance is 0, as no gradient came before
/// it froze, there is neither momentum nor error: one bit cannot say so.
bool update_agreed(const SpanUpdate& span, const AgreedMomentum& momentum, const Hyper& hyper,
                   std::int64_t step, Arena& arena, CpuIsa isa = cpu_isa());
/// The same; `check` tells whether what was written is finite.
void update_agreed(const SpanUpdate& span, const AgreedMomentum& momentum, const Hyper& hyper,
                   std::int64_t step, device::Device& device, FiniteCheck& check);

}  // namespace sherd::optim

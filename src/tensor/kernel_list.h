#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "tensor/kernels.h"

namespace sherd::tensor {

/// The groups of a table of kernels' times.
enum class KernelFamily : std::uint8_t {
  gemm,
  attention,
  norm,
  activation,
  dropout,
  elementwise,
  embedding,
  loss,
  reduction,
  movement,
  routing
};
/// Their names, in that order.
inline constexpr std::array<std::string_view, 11> kernel_families{
    "gemm",      "attention", "norm",      "activation", "dropout", "elementwise",
    "embedding", "loss",      "reduction", "movement",   "routing"};

// clang-format off
/// Every kernel of Kernels, as X(name, family). By this list classes of kernels are declared and forwarded.
/// One that it lacks leaves them abstract, which the compiler tells.
#define SHERD_KERNELS(X)                                                                                    \
  X(fill, movement) X(copy, movement) X(copy_rows, movement) X(copy_strided, movement)                      \
  X(fill_normal, movement) X(fill_uniform, movement) X(dequantize, movement)                                \
  X(matmul, gemm)                                                                                           \
  X(to_fp8, movement) X(fp8_largest, movement) X(fp8_scales, movement) X(fp8_encode, movement)              \
  X(fp8_decode, movement)                                                                                   \
  X(sum_rows, reduction) X(sum_axis, reduction) X(max_axis, reduction) X(max_axis_backward, reduction)      \
  X(softmax, reduction) X(softmax_backward, reduction) X(fold, reduction) X(sums_of_squares, reduction)     \
  X(add, elementwise) X(subtract, elementwise) X(multiply, elementwise) X(divide, elementwise)              \
  X(scale, elementwise) X(add_scaled, elementwise) X(zero_pruned, elementwise)                              \
  X(activation, activation) X(activation_backward, activation) X(tanh, activation)                          \
  X(tanh_backward, activation) X(relu, activation) X(relu_backward, activation) X(glu, activation)          \
  X(glu_backward, activation)                                                                               \
  X(dropout, dropout) X(dropout_backward, dropout)                                                          \
  X(layer_norm, norm) X(layer_norm_backward, norm) X(rms_norm, norm) X(rms_norm_backward, norm)             \
  X(embedding, embedding) X(embedding_backward, embedding) X(add_positions, embedding)                      \
  X(add_positions_backward, embedding) X(rotary, embedding)                                                 \
  X(attention, attention) X(attention_backward, attention) X(attend_stored, attention)                      \
  X(merge_attention, attention) X(attention_sinks, attention) X(attention_sinks_backward, attention)        \
  X(delta_rule, attention) X(delta_rule_backward, attention) X(delta_gates, activation)                     \
  X(delta_gates_backward, activation) X(short_conv, activation) X(short_conv_backward, activation)          \
  X(route, routing) X(route_backward, routing) X(combine_rows, routing) X(combine_rows_backward, routing)   \
  X(cross_entropy, loss) X(cross_entropy_total, loss) X(cross_entropy_backward, loss)                       \
  X(mean_squared_error, loss) X(mean_squared_error_backward, loss) X(binary_cross_entropy, loss)            \
  X(binary_cross_entropy_backward, loss) X(quotient, loss)
// clang-format on

template <class Method>
struct KernelSignature;
template <class... P>
struct KernelSignature<void (Kernels::*)(P...)> {
  using type = void(P...);
};

/// Declares a kernel in a class derived from Kernels: SHERD_KERNELS(SHERD_DECLARE_KERNEL) declares them all.
#define SHERD_DECLARE_KERNEL(name, ...) \
  typename ::sherd::tensor::KernelSignature<decltype(&::sherd::tensor::Kernels::name)>::type name;

/// Per kernel a class that overrides it by a call of Self's forward().
#define SHERD_FORWARD_KERNEL(name, family)                                              \
  template <class Self, class Method>                                                   \
  class Forwards_##name;                                                                \
  template <class Self, class... P>                                                     \
  class Forwards_##name<Self, void (Kernels::*)(P...)> : public virtual Kernels {       \
   public:                                                                              \
    void name(P... args) override {                                                     \
      static_cast<Self*>(this)->forward(KernelFamily::family, &Kernels::name, args...); \
    }                                                                                   \
  };
SHERD_KERNELS(SHERD_FORWARD_KERNEL)
#undef SHERD_FORWARD_KERNEL

#define SHERD_FORWARDED_KERNEL(name, family) Forwards_##name<Self, decltype(&Kernels::name)>,
/// The base of kernels that do one thing about every kernel that they do not override:
/// Self::forward(KernelFamily family, void (Kernels::*kernel)(P...), Args&... args), which is public.
template <class Self>
struct ForwardingKernels : SHERD_KERNELS(SHERD_FORWARDED_KERNEL) virtual Kernels {};
#undef SHERD_FORWARDED_KERNEL

}  // namespace sherd::tensor

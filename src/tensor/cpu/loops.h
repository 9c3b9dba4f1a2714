#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "tensor/argument_checks.h"
#include "tensor/cpu/cpu_kernels.h"

// Shared by the kernel families: chunked loops. Chunks have fixed sizes, so no result
// depends on the number of threads.

namespace sherd::tensor::cpu {

/// Elements per chunk of an element-wise loop: large next to the cost of handing out a chunk, small next to a
/// cache. A multiple of 64, the block of sum_of_squares and of the random streams.
inline constexpr Count element_grain = 32768;
/// fp32 elements that a loop keeps on the stack between two conversions.
inline constexpr Count stack_block = 1024;

inline Count ceil_div(Count a, Count b) {
  return (a + b - 1) / b;
}

/// Rows per chunk for rows of `width` elements.
inline Count row_grain(Count width) {
  return std::max<Count>(1, element_grain / std::max<Count>(1, width));
}

inline std::byte* at(const Tensor& t, Count element) {
  return t.raw() + static_cast<std::size_t>(element) * size_of(t.dtype());
}

inline std::byte* at_or_null(const Tensor& t, Count element) {
  return t ? at(t, element) : nullptr;
}
template <class T>
T* data_or_null(const Tensor& t) {
  return t ? t.data<T>() : nullptr;
}

/// fp32's, bf16's or fp16's place in the tables; not for fp64.
inline StorageIndex storage_index(DType dtype) {
  return dtype == DType::f32 ? storage_f32 : dtype == DType::bf16 ? storage_bf16 : storage_f16;
}
inline StorageIndex storage_index(const Tensor& t) {
  return storage_index(t.dtype());
}

/// The loop of an activation other than none.
inline Unary* activation_loop(const ElementwiseOps& ops, Activation kind) {
  constexpr Unary* ElementwiseOps::*loops[] = {nullptr,
                                               &ElementwiseOps::gelu_tanh,
                                               &ElementwiseOps::gelu_erf,
                                               &ElementwiseOps::sigmoid,
                                               &ElementwiseOps::exp,
                                               &ElementwiseOps::log};  // in the order of Activation
  static_assert(std::size(loops) == static_cast<std::size_t>(Activation::log) + 1);
  require(kind != Activation::none, "activation: there is none");
  return ops.*loops[static_cast<std::size_t>(kind)];
}

/// body(begin, count) over chunks of [0, n).
template <class Body>
void in_chunks(Device& device, Count n, Count grain, const Body& body) {
  if (n <= grain) {
    if (n > 0) body(Count{0}, n);
    return;
  }
  device.arena().parallel_for(n, grain, [&](Count begin, Count end) { body(begin, end - begin); });
}

/// body(i) for each i of [0, n), in chunks.
template <class Body>
void for_items(Device& device, Count n, Count grain, const Body& body) {
  in_chunks(device, n, grain, [&](Count begin, Count count) {
    for (Count i = begin; i < begin + count; ++i) body(i);
  });
}

/// out[i] = f(xs[i]...) for fp64 tensors.
template <class Fn, class... In>
void map_f64(const Fn& f, Device& device, const Tensor& out, const In&... xs) {
  const auto run = [&](double* to, const auto*... from) {
    for_items(device, out.numel(), element_grain, [&](Count i) { to[i] = f(from[i]...); });
  };
  run(out.data<double>(), xs.template data<double>()...);
}

/// Writes or adds fp32 sums to out[first, first + n), rounding once to its dtype (not fp64).
inline void write_sums(const IsaTable& isa, const float* sums, const Tensor& out, Count first, Count n,
                       bool accumulate) {
  const ConvertOps& ops = isa.convert[storage_index(out)];
  (accumulate ? ops.accumulate : ops.store)(sums, at(out, first), n);
}

/// out[to + i] (+)= Σ_k x[first + k·stride + i], k < count, in that order, for i in [0, n). Sums are formed
/// in the compute type and round once.
void sum_strided(Device& device, const IsaTable& isa, const Tensor& x, Count first, Count stride, Count count,
                 const Tensor& out, Count to, Count n, bool accumulate);

/// Elements from `first` on in the compute type, into it and from it.
inline void load_values(const IsaTable& isa, const Tensor& x, Count first, float* to, Count n) {
  isa.convert[storage_index(x)].load(at(x, first), to, n);
}
inline void load_values(const IsaTable&, const Tensor& x, Count first, double* to, Count n) {
  std::copy_n(x.data<double>() + first, n, to);
}
inline void store_values(const IsaTable& isa, const float* x, const Tensor& to, Count first, Count n) {
  isa.convert[storage_index(to)].store(x, at(to, first), n);
}
inline void store_values(const IsaTable&, const double* x, const Tensor& to, Count first, Count n) {
  std::copy_n(x, n, to.data<double>() + first);
}
/// All elements of a small tensor.
template <class C>
std::vector<C> all_values(const IsaTable& isa, const Tensor& x) {
  std::vector<C> out(static_cast<std::size_t>(x.numel()));
  load_values(isa, x, 0, out.data(), x.numel());
  return out;
}
/// Writes or adds sums in the compute type, rounding once.
inline void add_values(const IsaTable& isa, const float* sums, const Tensor& out, Count first, Count n,
                       bool accumulate) {
  write_sums(isa, sums, out, first, n, accumulate);
}
inline void add_values(const IsaTable&, const double* sums, const Tensor& out, Count first, Count n,
                       bool accumulate) {
  for (Count i = 0; i < n; ++i) {
    double& to = out.data<double>()[first + i];
    to = (accumulate ? to : 0) + sums[i];
  }
}

/// Rounds n <= stack_block fp32 values where they lie.
inline void round_values(const IsaTable& isa, float* values, DType dtype, Count n) {
  if (dtype != DType::bf16 && dtype != DType::f16) return;
  std::uint16_t rounded[stack_block];
  const ConvertOps& ops = isa.convert[storage_index(dtype)];
  ops.store(values, rounded, n);
  ops.load(rounded, values, n);
}

/// fold() into out[first, first + n) of n <= stack_block fp32 values, as if they had been in out's dtype.
/// Overwrites them.
inline void fold_values(const IsaTable& isa, float* values, DType rounding, const Tensor& out, Count first,
                        Count n, bool accumulate) {
  if (rounding != out.dtype() || accumulate) round_values(isa, values, out.dtype(), n);
  if (rounding != out.dtype()) round_values(isa, values, rounding, n);
  write_sums(isa, values, out, first, n, accumulate);
}

}  // namespace sherd::tensor::cpu

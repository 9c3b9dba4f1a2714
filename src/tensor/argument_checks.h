#pragma once

#include <cstdint>
#include <initializer_list>

#include "base/choices.h"
#include "tensor/tensor.h"

// The checks of arguments that the kernels of every device share, and their choice of types by dtypes. Each
// check throws Error{usage} that names the kernel.

namespace sherd::tensor {

/// fp64 for fp64, else fp32: the type that a kernel's sums are formed in.
inline DType compute_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

/// Calls f with a value of the floating type that `dtype` stores; kernels check first that it is one.
template <class Fn>
void with_floating(DType dtype, const Fn& f) {
  switch (dtype) {
    case DType::bf16:
      return f(bf16{});
    case DType::f16:
      return f(f16{});
    case DType::f64:
      return f(double{});
    default:
      return f(float{});
  }
}

/// Calls f with a value of the type that `dtype` stores.
template <class Fn>
void with_type(DType dtype, const Fn& f) {
  switch (dtype) {
    case DType::i32:
      return f(std::int32_t{});
    case DType::i64:
      return f(std::int64_t{});
    case DType::u16:
      return f(std::uint16_t{});
    case DType::u8:
      return f(std::uint8_t{});
    default:
      return with_floating(dtype, f);
  }
}

/// Calls f with a value of compute_type(dtype).
template <class Fn>
void with_compute_type(DType dtype, const Fn& f) {
  dtype == DType::f64 ? f(double{}) : f(float{});
}

/// Calls f with an unsigned integer of as many bytes as elements of `dtype` have, for what only moves them.
template <class Fn>
void with_bits(DType dtype, const Fn& f) {
  switch (size_of(dtype)) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      return f(std::uint64_t{});
  }
}

void require_floating(const char* kernel, const char* name, const Tensor& t);
/// Every tensor is floating and has `first`'s shape and dtype.
void require_alike(const char* kernel, const Tensor& first, std::initializer_list<const Tensor*> others);
/// `t` is a [n] (or any shape of n elements) of `dtype`.
void require_vector(const char* kernel, const char* name, const Tensor& t, std::int64_t n, DType dtype);
/// As above, for a gradient that may be kept in a wider type than the values: any floating dtype with the
/// same compute type.
void require_gradient(const char* kernel, const char* name, const Tensor& t, std::int64_t n, DType dtype);
/// `x` is one number in fp32 or fp64.
void require_number(const char* kernel, const char* name, const Tensor& x);
/// The arguments of sum_rows().
void require_row_sums(const Tensor& x, const Tensor& out);
/// The arguments of dequantize().
void require_blocks(StoredFormat format, const Tensor& blocks, const Tensor& out);
/// The arguments of copy(): as many elements, and no fraction lost.
void require_copyable(const Tensor& from, const Tensor& to);
/// x: [rows, 2f] = [gate | up] against y: [rows, f]. Returns f.
std::int64_t require_glu(const char* kernel, const Tensor& x, const Tensor& y);
/// The probability is in [0, 1). An element is kept when uniform_at() >= p, that is when its word's upper 24
/// bits are at least what this returns.
std::uint32_t keep_threshold(const char* kernel, float p);
/// The value as one of `dtype`, an integer type, to the bit; throws where it is none.
std::int64_t require_integer(double value, DType dtype);

}  // namespace sherd::tensor

#include "tensor/argument_checks.h"

#include <cmath>
#include <limits>

#include "tensor/formats/stored_format.h"

namespace sherd::tensor {

void require_floating(const char* kernel, const char* name, const Tensor& t) {
  require(t.defined(), kernel, ": ", name, " is not defined");
  require(is_floating(t.dtype()), kernel, ": ", name, " must be floating, not ", name_of(t.dtype()));
}

void require_alike(const char* kernel, const Tensor& first, std::initializer_list<const Tensor*> others) {
  require_floating(kernel, "the output", first);
  for (const Tensor* other : others) {
    require(other->defined(), kernel, ": an argument is not defined");
    require(other->shape() == first.shape(), kernel, ": shapes differ: ", other->shape().str(), " and ",
            first.shape().str());
    require(other->dtype() == first.dtype(), kernel, ": dtypes differ: ", name_of(other->dtype()), " and ",
            name_of(first.dtype()), "; convert one first (Kernels::copy(), autograd::cast())");
  }
}

void require_vector(const char* kernel, const char* name, const Tensor& t, std::int64_t n, DType dtype) {
  require(t.defined(), kernel, ": ", name, " is not defined");
  require(t.numel() == n, kernel, ": ", name, " must have ", n, " elements, not ", t.shape().str());
  require(t.dtype() == dtype, kernel, ": ", name, " must be ", name_of(dtype), ", not ", name_of(t.dtype()));
}

void require_gradient(const char* kernel, const char* name, const Tensor& t, std::int64_t n, DType dtype) {
  require_floating(kernel, name, t);
  require(t.numel() == n, kernel, ": ", name, " must have ", n, " elements, not ", t.shape().str());
  require(compute_type(t.dtype()) == compute_type(dtype), kernel, ": ", name, " cannot be ",
          name_of(t.dtype()), " for values in ", name_of(dtype));
}

void require_number(const char* kernel, const char* name, const Tensor& x) {
  require(x.defined() && x.numel() == 1 && (x.dtype() == DType::f32 || x.dtype() == DType::f64), kernel, ": ",
          name, " must be one number in fp32 or fp64");
}

void require_row_sums(const Tensor& x, const Tensor& out) {
  require(x && out, "sum_rows: x and out must be defined");
  require(is_floating(x.dtype()) && x.shape().rank() >= 1 && x.shape().back() == out.numel(),
          "sum_rows: x is ", name_of(x.dtype()), " ", x.shape().str(), " and out has ", out.numel(),
          " elements; rows must be as wide as out");
  require(out.dtype() == x.dtype() || (out.dtype() == DType::f32 && x.dtype() != DType::f64),
          "sum_rows: out is ", name_of(out.dtype()), " and x ", name_of(x.dtype()));
}

void require_copyable(const Tensor& from, const Tensor& to) {
  require(from.defined() && to.defined(), "copy: an argument is not defined");
  require(from.numel() == to.numel(), "copy: ", from.shape().str(), " and ", to.shape().str(),
          " differ in their number of elements");
  require(!is_floating(from.dtype()) || is_floating(to.dtype()), "copy: ", name_of(from.dtype()), " to ",
          name_of(to.dtype()), " would lose fractions");
}

void require_blocks(StoredFormat format, const Tensor& blocks, const Tensor& out) {
  require_floating("dequantize", "out", out);
  require(out.dtype() != DType::f64, "dequantize: values are made in fp32, bf16 or fp16, not fp64");
  require(blocks.defined() && blocks.dtype() == DType::u8, "dequantize: blocks must be uint8");
  const BlockSize size = block_size(format);
  require(out.numel() % size.elements == 0 && blocks.numel() == stored_bytes(format, out.numel()),
          "dequantize: ", blocks.shape().str(), " bytes are not the ", name_of(format), " blocks of ",
          out.shape().str());
}

std::int64_t require_glu(const char* kernel, const Tensor& x, const Tensor& y) {
  require_floating(kernel, "x", x);
  require(y.defined() && y.dtype() == x.dtype(), kernel, ": the tensors must share one dtype");
  require(x.shape().rank() >= 1 && x.shape() == y.shape().with_back(2 * y.shape().back()), kernel, ": ",
          x.shape().str(), " does not hold [gate | up] for ", y.shape().str());
  return y.shape().back();
}

std::uint32_t keep_threshold(const char* kernel, float p) {
  require(p >= 0 && p < 1, kernel, ": the probability must be in [0, 1), not ", p);
  return static_cast<std::uint32_t>(std::ceil(static_cast<double>(p) * 0x1p24));
}

std::int64_t require_integer(double value, DType dtype) {
  const double bound = std::ldexp(1.0, static_cast<int>(8 * size_of(dtype)));
  const bool is_signed = dtype == DType::i32 || dtype == DType::i64;
  const double least = is_signed ? -bound / 2 : 0, beyond = is_signed ? bound / 2 : bound;
  require(value == std::trunc(value) && value >= least && value < beyond, "fill: ", value,
          " is not a value of ", name_of(dtype));
  return static_cast<std::int64_t>(value);
}

}  // namespace sherd::tensor

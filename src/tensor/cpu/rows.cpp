#include <cstring>

#include "tensor/cpu/conversions.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// to[to_first, to_first + n) (+)= factor·from[from_first, …), in double: pairs of floating types with fp64.
void add_wide(const Tensor& from, Count from_first, const Tensor& to, Count to_first, Count n, double factor,
              bool accumulate) {
  with_type(from.dtype(), [&](auto source) {
    with_type(to.dtype(), [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      if constexpr (!std::is_integral_v<From> && !std::is_integral_v<To>) {
        const From* x = from.data<From>() + from_first;
        To* y = to.data<To>() + to_first;
        for (Count i = 0; i < n; ++i) {
          const double value = convert_one<double>(x[i]) * factor;
          y[i] = convert_one<To>(accumulate ? convert_one<double>(y[i]) + value : value);
        }
      }
    });
  });
}

bool with_f64(const Tensor& a, const Tensor& b) {
  return a.dtype() == DType::f64 || b.dtype() == DType::f64;
}

/// Elements that follow each other on both sides.
void copy_run(const IsaTable& isa, const Tensor& from, Count from_first, const Tensor& to, Count to_first,
              Count n, bool accumulate) {
  if (from.dtype() == to.dtype() && !accumulate)
    std::memcpy(at(to, to_first), at(from, from_first), static_cast<std::size_t>(n) * size_of(to.dtype()));
  else if (with_f64(from, to))
    add_wide(from, from_first, to, to_first, n, 1, accumulate);
  else
    convert_floats(isa, from, from_first, to, to_first, n, accumulate);
}

}  // namespace

void CpuKernels::copy_rows(const StridedRows& from, const StridedRows& to, std::int64_t rows,
                           std::int64_t columns, bool accumulate) {
  check_copy_rows(from, to, rows, columns, accumulate);
  if (rows == 0 || columns == 0) return;
  // Rows without gaps are one, so that chunks are cut alike whatever the shape.
  if (from.stride == columns && to.stride == columns) columns *= rows, rows = 1;
  in_chunks(device_, rows * columns, element_grain, [&](Count begin, Count count) {
    Count row = begin / columns, column = begin % columns;
    for (Count left = count; left > 0; ++row, column = 0) {
      const Count n = std::min(left, columns - column);
      copy_run(isa_, from.tensor, from.first + row * from.stride + column, to.tensor,
               to.first + row * to.stride + column, n, accumulate);
      left -= n;
    }
  });
}

void CpuKernels::add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to, bool accumulate) {
  check_add_scaled(from, factor, to);
  const double by = scalar_value(factor);
  in_chunks(device_, to.numel(), element_grain, [&](Count begin, Count count) {
    if (with_f64(from, to)) return add_wide(from, begin, to, begin, count, by, accumulate);
    float values[stack_block];
    for (Count i = begin; i < begin + count; i += stack_block) {
      const Count n = std::min(stack_block, begin + count - i);
      isa_.convert[storage_index(from)].load(at(from, i), values, n);
      isa_.elementwise[storage_f32].scale(values, static_cast<float>(by), values, n);
      write_sums(isa_, values, to, i, n, accumulate);
    }
  });
}

void CpuKernels::quotient(const Tensor& a, const Tensor& b, double factor, const Tensor& out) {
  check_quotient(a, b, out);
  const double divisor = scalar_value(b);
  fill(out, divisor == 0 ? 0 : factor * scalar_value(a) / divisor);
}

}  // namespace sherd::tensor::cpu

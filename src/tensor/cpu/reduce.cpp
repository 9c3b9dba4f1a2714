#include <cstring>
#include <mutex>

#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::f32:
      return static_cast<float>(value);
    case DType::bf16:
      return static_cast<float>(bf16(static_cast<float>(value)));
    case DType::f16:
      return static_cast<float>(f16(static_cast<float>(value)));
    default:
      return value;
  }
}

void fold_f64(const Tensor& from, DType rounding, const Tensor& to, bool accumulate, Count begin,
              Count count) {
  const double* x = from.data<double>();
  double* sums = to.data<double>();
  for (Count i = begin; i < begin + count; ++i) {
    const double value = round_to(rounding, x[i]);
    sums[i] = accumulate ? sums[i] + value : value;
  }
}

/// n <= stack_block elements from `first` on.
void fold_block(const IsaTable& isa, const Tensor& from, DType rounding, const Tensor& to, bool accumulate,
                Count first, Count n) {
  float values[stack_block];
  isa.convert[storage_index(from)].load(at(from, first), values, n);
  const bool rounds_anyway = rounding == from.dtype() || (rounding == to.dtype() && !accumulate);
  if (!rounds_anyway) round_values(isa, values, rounding, n);
  write_sums(isa, values, to, first, n, accumulate);
}

/// The fp64 counterpart of block_squares: the same eight lanes and the same folding.
double block_squares_f64(const double* x, Count n) {
  double lane[8] = {};
  for (Count i = 0; i < n; ++i) lane[i % 8] += x[i] * x[i];
  for (int width = 4; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

}  // namespace

void sum_strided(Device& device, const IsaTable& isa, const Tensor& x, Count first, Count stride, Count count,
                 const Tensor& out, Count to, Count n, bool accumulate) {
  in_chunks(device, n, stack_block, [&](Count begin, Count length) {
    if (x.dtype() == DType::f64) {
      const double* from = x.data<double>() + first;
      double* sums = out.data<double>() + to;
      for (Count i = begin; i < begin + length; ++i) {
        double sum = 0;
        for (Count k = 0; k < count; ++k) sum += from[k * stride + i];
        sums[i] = accumulate ? sums[i] + sum : sum;
      }
      return;
    }
    float sums[stack_block] = {};
    for (Count k = 0; k < count; ++k)
      isa.convert[storage_index(x)].add_to(at(x, first + k * stride + begin), sums, length);
    write_sums(isa, sums, out, to + begin, length, accumulate);
  });
}

void CpuKernels::fold(const Tensor& from, DType rounding, const Tensor& to, bool accumulate) {
  require_floating("fold", "to", to);
  require(is_floating(rounding), "fold: cannot round to ", name_of(rounding));
  require_gradient("fold", "from", from, to.numel(), to.dtype());
  in_chunks(device_, to.numel(), element_grain, [&](Count begin, Count count) {
    if (to.dtype() == DType::f64) return fold_f64(from, rounding, to, accumulate, begin, count);
    for (Count i = begin; i < begin + count; i += stack_block)
      fold_block(isa_, from, rounding, to, accumulate, i, std::min(stack_block, begin + count - i));
  });
}

void CpuKernels::sums_of_squares(std::span<const Tensor> all, ExactSum& sum) {
  for (const Tensor& x : all) require_floating("sum_of_squares", "x", x);
  std::mutex mutex;  // guards `sum`; the order of additions does not show in an exact sum
  for (const Tensor& x : all) {
    in_chunks(device_, x.numel(), element_grain, [&](Count begin, Count count) {
      double blocks[element_grain / 64];
      const Count n = (count + 63) / 64;
      if (x.dtype() == DType::f64) {
        for (Count b = 0; b < n; ++b)
          blocks[b] =
              block_squares_f64(x.data<double>() + begin + 64 * b, std::min<Count>(64, count - 64 * b));
      } else {
        isa_.convert[storage_index(x)].block_squares(at(x, begin), blocks, count);
      }
      ExactSum mine;
      mine.add(std::span(blocks, static_cast<std::size_t>(n)));
      const std::lock_guard lock(mutex);
      sum.add(mine);
    });
  }
}

}  // namespace sherd::tensor::cpu

#include <atomic>
#include <cmath>
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

void sum_ranks_f64(std::span<const Tensor> sources, double factor, DType rounding, const Tensor& out,
                   bool accumulate, Count begin, Count count) {
  double* to = out.data<double>();
  for (Count i = begin; i < begin + count; ++i) {
    double sum = sources[0].data<double>()[i];
    for (const Tensor& source : sources.subspan(1)) sum += source.data<double>()[i];
    sum = round_to(rounding, sum * factor);
    to[i] = accumulate ? to[i] + sum : sum;
  }
}

/// n <= stack_block elements from `first` on.
void sum_ranks_block(const IsaTable& isa, std::span<const Tensor> sources, float factor, DType rounding,
                     const Tensor& out, bool accumulate, Count first, Count n) {
  float sums[stack_block];
  isa.convert[storage_index(sources[0])].load(at(sources[0], first), sums, n);
  for (const Tensor& source : sources.subspan(1))
    isa.convert[storage_index(source)].add_to(at(source, first), sums, n);
  if (factor != 1) isa.elementwise[storage_f32].scale(sums, factor, sums, n);
  if (rounding == DType::bf16 || rounding == DType::f16) {
    std::uint16_t rounded[stack_block];
    const ConvertOps& ops = isa.convert[rounding == DType::bf16 ? storage_bf16 : storage_f16];
    ops.store(sums, rounded, n);
    if (rounding == out.dtype() && !accumulate) {
      std::memcpy(at(out, first), rounded, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
      return;
    }
    ops.load(rounded, sums, n);
  }
  write_sums(isa, sums, out, first, n, accumulate);
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

void CpuKernels::sum_ranks(std::span<const Tensor> sources, double factor, DType rounding, const Tensor& out,
                           bool accumulate) {
  require_floating("sum_ranks", "out", out);
  require(!sources.empty(), "sum_ranks: there are no sources");
  require(is_floating(rounding), "sum_ranks: cannot round to ", name_of(rounding));
  for (const Tensor& source : sources)
    require_gradient("sum_ranks", "a source", source, out.numel(), out.dtype());
  in_chunks(device_, out.numel(), element_grain, [&](Count begin, Count count) {
    if (out.dtype() == DType::f64)
      return sum_ranks_f64(sources, factor, rounding, out, accumulate, begin, count);
    for (Count i = begin; i < begin + count; i += stack_block)
      sum_ranks_block(isa_, sources, static_cast<float>(factor), rounding, out, accumulate, i,
                      std::min(stack_block, begin + count - i));
  });
}

void CpuKernels::sum_of_squares(std::span<const Tensor> all, ExactSum& sum) {
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

bool CpuKernels::all_finite(const Tensor& x) {
  require_floating("all_finite", "x", x);
  std::atomic<bool> finite{true};
  in_chunks(device_, x.numel(), element_grain, [&](Count begin, Count count) {
    if (!finite.load(std::memory_order_relaxed)) return;
    bool good = true;
    if (x.dtype() == DType::f64)
      for (Count i = begin; i < begin + count; ++i) good &= std::isfinite(x.data<double>()[i]);
    else
      good = isa_.convert[storage_index(x)].all_finite(at(x, begin), count);
    if (!good) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace sherd::tensor::cpu

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

void dropout_f64(Device& device, const Tensor& x, const Tensor& residual, float p,
                 const RandomElements& random, const Tensor& out) {
  const double factor = 1 / (1 - static_cast<double>(p));
  const double* from = x.data<double>();
  const double* base = residual ? residual.data<double>() : nullptr;
  double* to = out.data<double>();
  for_items(device, out.numel(), element_grain, [&](Count i) {
    const double kept =
        uniform_at(random.key, random.first + static_cast<std::uint64_t>(i)) >= p ? from[i] * factor : 0;
    to[i] = base ? base[i] + kept : kept;
  });
}

/// dropout() of the n < 4 elements from `first` on of a block of the stream, of which it makes all four.
void dropout_within_block(const DropoutOps& ops, const Tensor& x, const Tensor& residual, const Tensor& out,
                          Count n, const RandomElements& random, std::uint32_t threshold, float factor) {
  const auto before = static_cast<Count>(random.first % 4);
  const std::size_t skipped = static_cast<std::size_t>(before) * size_of(x.dtype()),
                    bytes = static_cast<std::size_t>(n) * size_of(x.dtype());
  std::byte values[16] = {}, base[16] = {}, results[16];  // four of fp32
  std::memcpy(values + skipped, x.raw(), bytes);
  if (residual) std::memcpy(base + skipped, residual.raw(), bytes);
  ops.dropout(values, residual ? base : nullptr, results, before + n,
              random.first - static_cast<std::uint64_t>(before), random.key.seed, random.key.stream,
              threshold, factor);
  std::memcpy(out.raw(), results + skipped, bytes);
}

/// x[i] = offset + factor·(element first + i of a stream), in double, then rounded to fp32 and to x's dtype.
/// blocks(index, count, out) gives elements 4·index … 4·(index + count) - 1.
template <class Blocks>
void fill_stream(Device& device, const IsaTable& isa, const char* kernel, const Tensor& x, Count first,
                 double offset, double factor, const Blocks& blocks) {
  require_floating(kernel, "x", x);
  require(first >= 0, kernel, ": the first index must not be negative");
  in_chunks(device, x.numel(), element_grain / 8, [&](Count begin, Count count) {
    float elements[stack_block + 8];
    double values[stack_block];
    float rounded[stack_block];
    for (Count i = begin; i < begin + count; i += stack_block) {
      const Count n = std::min(stack_block, begin + count - i);
      const Count before = (first + i) % 4;
      blocks(static_cast<std::uint64_t>((first + i) / 4), (before + n + 3) / 4, elements);
      for (Count k = 0; k < n; ++k) values[k] = offset + factor * static_cast<double>(elements[before + k]);
      if (x.dtype() == DType::f64) {
        std::copy_n(values, n, x.data<double>() + i);
        continue;
      }
      std::transform(values, values + n, rounded, [](double value) { return static_cast<float>(value); });
      isa.convert[storage_index(x)].store(rounded, at(x, i), n);
    }
  });
}

}  // namespace

void CpuKernels::dropout(const Tensor& x, const Tensor& residual, float p, RandomElements random,
                         const Tensor& out) {
  require_alike("dropout", out, {&x});
  if (residual) require_alike("dropout", out, {&residual});
  const std::uint32_t threshold = keep_threshold("dropout", p);
  if (threshold == 0) return residual ? add(residual, x, out) : copy(x, out);
  if (out.dtype() == DType::f64) return dropout_f64(device_, x, residual, p, random, out);
  const DropoutOps& ops = isa_.dropout[storage_index(out)];
  const float factor = 1.0f / (1.0f - p);
  // Vectors take whole blocks of four; the elements before the first one are made by themselves.
  const Count before = std::min(out.numel(), static_cast<Count>((4 - random.first % 4) % 4));
  if (before > 0) dropout_within_block(ops, x, residual, out, before, random, threshold, factor);
  in_chunks(device_, out.numel() - before, element_grain, [&](Count begin, Count count) {
    const Count i = before + begin;
    ops.dropout(at(x, i), residual ? at(residual, i) : nullptr, at(out, i), count,
                random.first + static_cast<std::uint64_t>(i), random.key.seed, random.key.stream, threshold,
                factor);
  });
}

void CpuKernels::dropout_backward(const Tensor& dy, float p, RandomElements random, const Tensor& dx) {
  dropout(dy, {}, p, random, dx);
}

void CpuKernels::fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) {
  fill_stream(device_, isa_, "fill_normal", x, first, mean, std,
              [&](std::uint64_t block, Count count, float* out) {
                isa_.normals(key.seed, key.stream, block, count, out);
                for (Count i = 0; i < 4 * count; ++i)
                  if (std::isnan(out[i])) out[i] = normal_at(key, 4 * block + static_cast<std::uint64_t>(i));
              });
}

void CpuKernels::fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) {
  fill_stream(device_, isa_, "fill_uniform", x, first, low, high - low,
              [key](std::uint64_t block, Count count, float* out) {
                for (Count i = 0; i < count; ++i)
                  for (const std::uint32_t word : philox(key, block + static_cast<std::uint64_t>(i)))
                    *out++ = static_cast<float>(word >> 8) * 0x1p-24f;  // uniform_at()
              });
}

}  // namespace sherd::tensor::cpu

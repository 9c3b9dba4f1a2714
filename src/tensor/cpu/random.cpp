#include <algorithm>
#include <array>
#include <cmath>

#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

void dropout_f64(Device& device, const Tensor& x, const Tensor& residual, float p, RandomKey key,
                 const Tensor& out) {
  const double factor = 1 / (1 - static_cast<double>(p));
  const double* from = x.data<double>();
  const double* base = residual ? residual.data<double>() : nullptr;
  double* to = out.data<double>();
  in_chunks(device, out.numel(), element_grain, [&](Count begin, Count count) {
    for (Count i = begin; i < begin + count; ++i) {
      const double kept = uniform_at(key, static_cast<std::uint64_t>(i)) >= p ? from[i] * factor : 0;
      to[i] = base ? base[i] + kept : kept;
    }
  });
}

/// x[i] = offset + factor·(element first + i of a stream), in double, then rounded to fp32 and to x's dtype.
/// `block` gives elements 4·index … 4·index + 3.
template <class Block>
void fill_stream(Device& device, const IsaTable& isa, const char* kernel, const Tensor& x, Count first,
                 double offset, double factor, const Block& block) {
  require_floating(kernel, "x", x);
  require(first >= 0, kernel, ": the first index must not be negative");
  in_chunks(device, x.numel(), element_grain / 8, [&](Count begin, Count count) {
    double values[stack_block];
    float rounded[stack_block];
    for (Count i = begin; i < begin + count; i += stack_block) {
      const Count n = std::min(stack_block, begin + count - i);
      for (Count k = 0; k < n;) {
        const auto index = static_cast<std::uint64_t>(first + i + k);
        const std::array<float, 4> four = block(index / 4);
        for (std::size_t within = index % 4; within < 4 && k < n; ++within, ++k)
          values[k] = offset + factor * static_cast<double>(four[within]);
      }
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

void CpuKernels::dropout(const Tensor& x, const Tensor& residual, float p, RandomKey key, const Tensor& out) {
  require_alike("dropout", out, {&x});
  if (residual) require_alike("dropout", out, {&residual});
  const std::uint32_t threshold = keep_threshold("dropout", p);
  if (threshold == 0) return residual ? add(residual, x, out) : copy(x, out);
  if (out.dtype() == DType::f64) return dropout_f64(device_, x, residual, p, key, out);
  const auto op = isa_.dropout[storage_index(out)].dropout;
  in_chunks(device_, out.numel(), element_grain, [&](Count begin, Count count) {
    op(at(x, begin), residual ? at(residual, begin) : nullptr, at(out, begin), count,
       static_cast<std::uint64_t>(begin), key.seed, key.stream, threshold, 1.0f / (1.0f - p));
  });
}

void CpuKernels::dropout_backward(const Tensor& dy, float p, RandomKey key, const Tensor& dx) {
  dropout(dy, {}, p, key, dx);
}

void CpuKernels::fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) {
  fill_stream(device_, isa_, "fill_normal", x, first, mean, std,
              [key](std::uint64_t block) { return normal_block(key, block); });
}

void CpuKernels::fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) {
  fill_stream(device_, isa_, "fill_uniform", x, first, low, high - low, [key](std::uint64_t block) {
    std::array<float, 4> out;
    const auto words = philox(key, block);
    for (std::size_t i = 0; i < 4; ++i)
      out[i] = static_cast<float>(words[i] >> 8) * 0x1p-24f;  // uniform_at()
    return out;
  });
}

}  // namespace sherd::tensor::cpu

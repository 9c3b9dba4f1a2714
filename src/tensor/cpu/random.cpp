#include <cmath>

#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

/// An element is kept when uniform_at() >= p, that is when its word's upper 24 bits are at least this.
std::uint32_t keep_threshold(const char* kernel, float p) {
  require(p >= 0 && p < 1, kernel, ": the probability must be in [0, 1), not ", p);
  return static_cast<std::uint32_t>(std::ceil(static_cast<double>(p) * 0x1p24));
}

void dropout_f64(Device& device, const Tensor& x, const Tensor& residual, float p, RandomKey key, const Tensor& out) {
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

/// Writes value(i) for stream elements first + i, `make` filling a block of floats at a time.
template <class Make>
void fill_stream(Device& device, const IsaTable& isa, const char* kernel, const Tensor& x, Count first,
                 double offset, double factor, const Make& make) {
  require_floating(kernel, "x", x);
  require(first >= 0, kernel, ": the first index must not be negative");
  in_chunks(device, x.numel(), element_grain / 8, [&](Count begin, Count count) {
    float block[stack_block];
    for (Count i = begin; i < begin + count; i += stack_block) {
      const Count n = std::min(stack_block, begin + count - i);
      make(static_cast<std::uint64_t>(first + i), block, n);
      if (x.dtype() == DType::f64) {
        for (Count k = 0; k < n; ++k) x.data<double>()[i + k] = offset + factor * static_cast<double>(block[k]);
        continue;
      }
      for (Count k = 0; k < n; ++k)
        block[k] = static_cast<float>(offset + factor * static_cast<double>(block[k]));
      isa.convert[storage_index(x)].store(block, at(x, i), n);
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
  fill_stream(device_, isa_, "fill_normal", x, first, mean, std, [&](std::uint64_t index, float* block, Count n) {
    for (Count k = 0; k < n; ++k) block[k] = normal_at(key, index + static_cast<std::uint64_t>(k));
  });
}

void CpuKernels::fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) {
  fill_stream(device_, isa_, "fill_uniform", x, first, low, high - low,
              [&](std::uint64_t index, float* block, Count n) {
                for (Count k = 0; k < n; ++k) block[k] = uniform_at(key, index + static_cast<std::uint64_t>(k));
              });
}

}  // namespace sherd::tensor::cpu

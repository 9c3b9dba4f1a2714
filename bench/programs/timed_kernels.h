#pragma once

#include <array>

#include "bench/programs/serving.h"
#include "tensor/kernel_list.h"

namespace sherd::bench {

/// Kernels that add up the seconds spent in each family and pass every call on. The clock is read twice per
/// call, which is nothing next to what kernels take.
class TimedKernels final : public tensor::ForwardingKernels<TimedKernels> {
 public:
  explicit TimedKernels(tensor::Kernels& inner) : inner_(inner) {}

  double seconds(tensor::KernelFamily family) const { return seconds_[static_cast<std::size_t>(family)]; }
  /// Multiply-adds of all products, times two.
  double gemm_flops() const { return gemm_flops_; }
  void reset() { seconds_ = {}, gemm_flops_ = 0; }

  tensor::Device& device() override { return inner_.device(); }
  bool folds_gradients() const override { return inner_.folds_gradients(); }
  bool multiplies_stored() const override { return inner_.multiplies_stored(); }
  void require_fp8(const tensor::Fp8Recipe& recipe) const override { inner_.require_fp8(recipe); }
  void matmul(const tensor::Matmul& m) override {
    const std::int64_t depth = m.fp8_a ? m.fp8_a.cols : m.trans_a ? m.a.shape().rows() : m.a.shape().back();
    gemm_flops_ += 2.0 * static_cast<double>(m.c.numel()) * static_cast<double>(depth);
    forward(tensor::KernelFamily::gemm, &tensor::Kernels::matmul, m);
  }
  template <class Kernel, class... Args>
  void forward(tensor::KernelFamily family, Kernel kernel, Args&... args) {
    seconds_[static_cast<std::size_t>(family)] += seconds_of([&] { (inner_.*kernel)(args...); });
  }

 private:
  tensor::Kernels& inner_;
  std::array<double, tensor::kernel_families.size()> seconds_{};
  double gemm_flops_ = 0;
};

}  // namespace sherd::bench

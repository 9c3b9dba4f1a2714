#pragma once

#include "tensor/extents.h"
#include "tensor/kernel_list.h"
#include "tensor/kernels.h"

namespace sherd::tensor::meta {

/// Kernels that read and write no tensor. Each charges for a moment the workspace that the kernel holds for
/// which it stands, the CPU's with as many threads or a GPU's with `options` (make_meta_gpu()), so that the
/// ledger's peaks are those of a real run. What cuBLASLt takes is charged at its ceiling, what cuDNN takes by
/// its rules.
class MetaKernels final : public ForwardingKernels<MetaKernels> {
 public:
  explicit MetaKernels(Device& device, const CudaOptions& options = {})
      : device_(device), options_(options), gpu_(device.has_own_memory()) {}

  Device& device() override { return device_; }
  bool folds_gradients() const override { return !gpu_; }
  bool multiplies_stored() const override { return !gpu_; }
  /// Kernels that need no workspace.
  template <class Kernel, class... Args>
  void forward(KernelFamily, Kernel, Args&...) {}

  SHERD_DECLARE_KERNEL(matmul)
  SHERD_DECLARE_KERNEL(sum_rows)
  SHERD_DECLARE_KERNEL(sum_axis)
  SHERD_DECLARE_KERNEL(layer_norm_backward)
  SHERD_DECLARE_KERNEL(rms_norm_backward)
  SHERD_DECLARE_KERNEL(embedding_backward)
  SHERD_DECLARE_KERNEL(rotary)
  SHERD_DECLARE_KERNEL(attention)
  SHERD_DECLARE_KERNEL(attention_backward)
  SHERD_DECLARE_KERNEL(attention_sinks_backward)
  SHERD_DECLARE_KERNEL(attend_stored)
  SHERD_DECLARE_KERNEL(delta_rule)
  SHERD_DECLARE_KERNEL(delta_rule_backward)
  SHERD_DECLARE_KERNEL(short_conv)
  SHERD_DECLARE_KERNEL(short_conv_backward)
  SHERD_DECLARE_KERNEL(mean_squared_error)
  SHERD_DECLARE_KERNEL(mean_squared_error_backward)
  SHERD_DECLARE_KERNEL(binary_cross_entropy)
  SHERD_DECLARE_KERNEL(sums_of_squares)

 private:
  /// Raises the peak by what a kernel would hold until it returns.
  void charge(std::size_t workspace, device::Tier tier = device::Tier::device);

  Device& device_;
  CudaOptions options_;
  bool gpu_;  ///< the device stands for a GPU
  RotaryTables angles_;
};

}  // namespace sherd::tensor::meta

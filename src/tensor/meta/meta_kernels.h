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

  void matmul(const Matmul& args) override;
  void sum_rows(const Tensor& x, const Tensor& out, bool) override;
  void sum_axis(const Tensor& x, const AxisExtents& axis, double factor, const Tensor& out, bool) override;
  void layer_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor& dweight, const Tensor& dbias, bool, bool) override;
  void rms_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const Tensor& dweight, bool, bool, double) override;
  void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor&, bool, const VocabSlice&,
                          std::optional<DType>) override;
  void rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool,
              const Tensor&) override;
  void attention(const Tensor& qkv, const Attention& geometry, const Tensor&, const Tensor&) override;
  void attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor&, const Tensor&,
                          const Tensor&, const Tensor&) override;
  void attention_sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& lse, const Tensor&,
                                const Tensor&, bool) override;
  void attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store, const Tensor& sinks,
                     const Tensor& out) override;
  void delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule, const StateStore& store,
                  const Tensor& states, const Tensor& out) override;
  void delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                           const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                           const Tensor& dgates) override;
  void short_conv(const Tensor& x, const Tensor& weight, const std::shared_ptr<const Documents>& documents,
                  const StateStore& store, const Tensor& out) override;
  void short_conv_backward(const Tensor& x, const Tensor& weight,
                           const std::shared_ptr<const Documents>& documents, const Tensor& dout,
                           const Tensor& dx, const Tensor& dweight, bool) override;
  void mean_squared_error(const Tensor& x, const Tensor&, const Tensor&) override;
  void mean_squared_error_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor& dx) override;
  void binary_cross_entropy(const Tensor& logits, const Tensor&, const Tensor&, const Tensor&) override;
  void sums_of_squares(std::span<const Tensor> all, ExactSum&) override;

 private:
  /// Raises the peak by what a kernel would hold until it returns.
  void charge(std::size_t workspace, device::Tier tier = device::Tier::device);

  Device& device_;
  CudaOptions options_;
  bool gpu_;  ///< the device stands for a GPU
  RotaryTables angles_;
};

}  // namespace sherd::tensor::meta

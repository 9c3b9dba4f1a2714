#pragma once

#include "device/meta.h"
#include "tensor/cuda_options.h"

namespace sherd::tensor::meta {

/// Kernels that read and write no tensor. Each charges for a moment the workspace that the kernel holds for
/// which it stands, the CPU's with as many threads or a GPU's with `options` (device/meta.h), so that the
/// ledger's peaks are those of a real run. What cuBLASLt takes is booked at its ceiling, what cuDNN takes by
/// its rules.
class MetaKernels : public Kernels {
 public:
  explicit MetaKernels(Device& device, const CudaOptions& options = {})
      : device_(device), options_(options), gpu_(device::stands_for(device) == device::Kind::cuda) {}

  Device& device() override { return device_; }
  void fill(const Tensor&, double) override {}
  void copy(const Tensor&, const Tensor&) override {}
  void copy_rows(const StridedRows&, const StridedRows&, std::int64_t, std::int64_t, bool) override {}
  void add_scaled(const Tensor&, const Tensor&, const Tensor&, bool) override {}
  void quotient(const Tensor&, const Tensor&, double, const Tensor&) override {}
  void copy_strided(const Tensor&, const Strides&, const Tensor&) override {}
  void matmul(const Matmul& args) override;
  void sum_rows(const Tensor& x, const Tensor& out, bool) override;
  void sum_axis(const Tensor& x, const Axis& axis, double factor, const Tensor& out, bool) override;
  void max_axis(const Tensor&, const Axis&, const Tensor&) override {}
  void max_axis_backward(const Tensor&, const Tensor&, const Tensor&, const Axis&, const Tensor&) override {}
  void softmax(const Tensor&, const Softmax&, const Tensor&) override {}
  void softmax_backward(const Tensor&, const Tensor&, const Softmax&, const Tensor&) override {}
  void add(const Tensor&, const Tensor&, const Tensor&) override {}
  void subtract(const Tensor&, const Tensor&, const Tensor&) override {}
  void multiply(const Tensor&, const Tensor&, const Tensor&) override {}
  void divide(const Tensor&, const Tensor&, const Tensor&) override {}
  void scale(const Tensor&, double, const Tensor&) override {}
  void activation(Activation, const Tensor&, const Tensor&) override {}
  void activation_backward(Activation, const Tensor&, const Tensor&, const Tensor&) override {}
  void tanh(const Tensor&, const Tensor&) override {}
  void tanh_backward(const Tensor&, const Tensor&, const Tensor&) override {}
  void relu(const Tensor&, const Tensor&) override {}
  void relu_backward(const Tensor&, const Tensor&, const Tensor&) override {}
  void swiglu(const Tensor&, const Tensor&) override {}
  void swiglu_backward(const Tensor&, const Tensor&, const Tensor&) override {}
  void dropout(const Tensor&, const Tensor&, float, RandomElements, const Tensor&) override {}
  void dropout_backward(const Tensor&, float, RandomElements, const Tensor&) override {}
  void layer_norm(const Tensor&, const Tensor&, const Tensor&, double, const Tensor&, const Tensor&,
                  const Tensor&) override {}
  void layer_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor& dweight, const Tensor& dbias, bool, bool) override;
  void rms_norm(const Tensor&, const Tensor&, double, const Tensor&, const Tensor&) override {}
  void rms_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const Tensor& dweight, bool, bool) override;
  void embedding(const Tensor&, const Tensor&, const Tensor&, const VocabSlice&) override {}
  void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor&, bool, const VocabSlice&,
                          std::optional<DType>) override;
  void add_positions(const Tensor&, const Tensor&, const Tensor&, const Positions&) override {}
  void add_positions_backward(const Tensor&, const Tensor&, bool, const Positions&) override {}
  void rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool,
              const Tensor&) override;
  void attention(const Tensor& qkv, const Attention& geometry, const Tensor&, const Tensor&) override;
  void attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor&, const Tensor&,
                          const Tensor&, const Tensor&) override;
  void attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                     const Tensor& out) override;
  void merge_attention(const Tensor&, const Tensor&, std::int64_t, bool, const Tensor&,
                       const Tensor&) override {}
  void route(const Tensor&, const Tensor&, const Routing&, const Tensor&, const Tensor&,
             const Tensor&) override {}
  void route_backward(const Tensor&, const Routing&, const Tensor&, const Tensor&, const Tensor&,
                      const RouterLossGradients&, const Tensor&) override {}
  void combine_rows(const Tensor&, const Tensor&, const Tensor&, const Tensor&) override {}
  void combine_rows_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&) override {}
  void cross_entropy(const Tensor&, const Tensor&, const VocabSlice&, std::int32_t, const Tensor&,
                     const Tensor&, const Tensor&) override {}
  void cross_entropy_total(const Tensor&, const Tensor&, const Tensor&, std::int32_t, const Tensor&,
                           const Tensor&, bool) override {}
  void cross_entropy_backward(const Tensor&, const Tensor&, const Tensor&, const VocabSlice&, std::int32_t,
                              const Tensor&) override {}
  void mean_squared_error(const Tensor& x, const Tensor&, const Tensor&) override;
  void mean_squared_error_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor& dx) override;
  void binary_cross_entropy(const Tensor& logits, const Tensor&, const Tensor&, const Tensor&) override;
  void binary_cross_entropy_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                     const Tensor&) override {}
  void dequantize(const Tensor&, const Tensor&) override {}
  void fold(const Tensor&, DType, const Tensor&, bool) override {}
  bool folds_gradients() const override { return !gpu_; }
  using Kernels::sum_of_squares;
  void sum_of_squares(std::span<const Tensor> all, ExactSum&) override;
  void fill_normal(const Tensor&, RandomKey, std::int64_t, double, double) override {}
  void fill_uniform(const Tensor&, RandomKey, std::int64_t, double, double) override {}

 private:
  /// Raises the peak by what a kernel would hold until it returns.
  void charge(std::size_t workspace, device::Tier tier = device::Tier::device);

  Device& device_;
  CudaOptions options_;
  bool gpu_;       ///< stands for one
  Tensor angles_;  ///< of the last rotary geometry, which kernels keep
  Rotary rotary_;  ///< theirs
};

}  // namespace sherd::tensor::meta

#include "tensor/meta/meta_kernels.h"

#include "tensor/cpu/workspace.h"

namespace sherd::tensor::meta {

void MetaKernels::book(std::size_t workspace) {
  if (workspace == 0) return;
  device_.ledger().charge(device::Tier::device, Category::workspace, workspace);
  device_.ledger().credit(device::Tier::device, Category::workspace, workspace);
}

void MetaKernels::matmul(const Matmul& args) {
  book(cpu::matmul_workspace(device_, args));
}

void MetaKernels::sum_rows(const Tensor& x, const Tensor& out, bool) {
  book(cpu::sum_rows_workspace(x, out));
}

void MetaKernels::layer_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                                      const Tensor&, const Tensor&, const Tensor& dweight,
                                      const Tensor& dbias, bool) {
  book(cpu::norm_backward_workspace(x, dweight, dbias));
}

void MetaKernels::rms_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                                    const Tensor&, const Tensor& dweight, bool) {
  book(cpu::norm_backward_workspace(x, dweight, {}));
}

void MetaKernels::rotary(const Tensor& qkv, const Attention& geometry, double base, bool, const Tensor&) {
  const std::int64_t seq = qkv.shape()[-2], half = geometry.head_dim(qkv.shape().back()) / 2;
  const DType compute = qkv.dtype() == DType::f64 ? DType::f64 : DType::f32;
  if (angles_ && angles_.shape()[1] >= seq && angles_.shape()[2] == half && angles_base_ == base &&
      angles_.dtype() == compute)
    return;
  angles_ = {};
  angles_ = Tensor::empty(device_, {2, seq, half}, compute, Category::workspace);  // cosines and sines
  angles_base_ = base;
}

void MetaKernels::attention(const Tensor& qkv, const Attention& geometry, const Tensor&, const Tensor&) {
  book(cpu::attention_workspace(device_, qkv, geometry));
}

void MetaKernels::attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor&,
                                     const Tensor&, const Tensor&, const Tensor&) {
  book(cpu::attention_backward_workspace(device_, qkv, geometry));
}

}  // namespace sherd::tensor::meta

#include "tensor/meta/meta_kernels.h"

#include <algorithm>

#include "tensor/cpu/cpu_kernels.h"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::meta {

void MetaKernels::charge(std::size_t workspace, device::Tier tier) {
  if (workspace > 0) device_.allocate(workspace, Category::workspace, tier);
}

void MetaKernels::matmul(const Matmul& args) {
  const MatmulExtents e = check_matmul(args);
  if (!gpu_) return charge(cpu::matmul_workspace(device_, args));
  if (args.c.numel() > 0) charge(cuda::most_matmul_workspace + cuda::fp8_sums_workspace(args, e));
}

void MetaKernels::sum_rows(const Tensor& x, const Tensor& out, bool) {
  charge(gpu_ ? cuda::sum_rows_workspace(x, out) : cpu::sum_rows_workspace(x, out));
}

void MetaKernels::sum_axis(const Tensor& x, const AxisExtents& axis, double factor, const Tensor& out, bool) {
  if (sums_rows(x, axis, factor, out)) sum_rows(x.reshape({axis.extent, axis.inner}), out, false);
}

void MetaKernels::layer_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                                      const Tensor&, const Tensor&, const Tensor& dweight,
                                      const Tensor& dbias, bool, bool) {
  charge(gpu_ ? cuda::norm_backward_workspace(x, dweight, dbias)
              : cpu::norm_backward_workspace(x, dweight, dbias));
}

void MetaKernels::rms_norm_backward(const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                                    const Tensor&, const Tensor& dweight, bool, bool, double) {
  charge(gpu_ ? cuda::norm_backward_workspace(x, dweight, {}) : cpu::norm_backward_workspace(x, dweight, {}));
}

void MetaKernels::rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool,
                         const Tensor&) {
  const std::int64_t turned = rotary_size(rotary, geometry.head_dim(qkv.shape().back()));
  angles_.of_both(device_, geometry.positions.end(qkv.shape()[-2]), turned / 2, rotary,
                  compute_type(qkv.dtype()), [](const RotaryAngles&) {});
}

void MetaKernels::attention(const Tensor& qkv, const Attention& geometry, const Tensor&, const Tensor&) {
  charge(gpu_ ? cuda::attention_workspace(qkv, geometry) : cpu::attention_workspace(device_, qkv, geometry));
}

void MetaKernels::attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor&,
                                     const Tensor&, const Tensor&, const Tensor&) {
  charge(gpu_ ? cuda::attention_backward_workspace(qkv, geometry, options_.deterministic_attention)
              : cpu::attention_backward_workspace(device_, qkv, geometry));
}

void MetaKernels::attention_sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& lse,
                                           const Tensor&, const Tensor&, bool) {
  if (gpu_) charge(cuda::attention_sinks_backward_workspace(sinks, out, lse));
}

void MetaKernels::attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                                const Tensor& sinks, const Tensor& out) {
  charge(gpu_ ? cuda::attend_stored_workspace(qkv, geometry, store, sinks, out)
              : cpu::attend_stored_workspace(device_, qkv, geometry, store, sinks, out));
}

void MetaKernels::delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                             const StateStore& store, const Tensor& states, const Tensor& out) {
  const DeltaExtents e = check_delta_rule(qkv, gates, rule, store, states, out);
  const Documents* documents = store.states ? nullptr : rule.documents.get();
  if (gpu_) charge(cuda::delta_rule_workspace(e, documents, qkv.dtype(), false));
}

void MetaKernels::delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                      const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                                      const Tensor& dgates) {
  const DeltaExtents e = check_delta_rule_backward(qkv, gates, rule, states, dout, dqkv, dgates);
  if (gpu_) charge(cuda::delta_rule_workspace(e, rule.documents.get(), qkv.dtype(), true));
}

void MetaKernels::short_conv(const Tensor& x, const Tensor& weight,
                             const std::shared_ptr<const Documents>& documents, const StateStore& store,
                             const Tensor& out) {
  const ConvExtents e = check_short_conv("short_conv", x, weight, documents.get(), store, out);
  if (gpu_ && !store.states) charge(cuda::row_starts_workspace(documents.get(), e.batch * e.rows));
}

void MetaKernels::short_conv_backward(const Tensor& x, const Tensor& weight,
                                      const std::shared_ptr<const Documents>& documents, const Tensor& dout,
                                      const Tensor& dx, const Tensor& dweight, bool) {
  const ConvExtents e = check_short_conv_backward(x, weight, documents.get(), dout, dx, dweight);
  if (gpu_) charge(cuda::short_conv_backward_workspace(e, documents.get(), x.dtype(), dweight.defined()));
}

void MetaKernels::embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor&, bool,
                                     const VocabSlice&, std::optional<DType>) {
  if (gpu_ && dy.numel() > 0) charge(cuda::embedding_backward_workspace(ids));
}

void MetaKernels::mean_squared_error(const Tensor& x, const Tensor&, const Tensor&) {
  if (gpu_) charge(cuda::mean_squared_error_workspace(x));
}

void MetaKernels::binary_cross_entropy(const Tensor& logits, const Tensor&, const Tensor&, const Tensor&) {
  if (gpu_) charge(2 * cuda::mean_squared_error_workspace(logits));
}

void MetaKernels::mean_squared_error_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor& dx) {
  if (gpu_) charge(cuda::mean_squared_error_backward_workspace(dx));
}

void MetaKernels::sums_of_squares(std::span<const Tensor> all, ExactSum&) {
  if (!gpu_ || std::all_of(all.begin(), all.end(), [](const Tensor& x) { return x.numel() == 0; })) return;
  charge(cuda::sum_of_squares_workspace);
  charge(cuda::sum_of_squares_workspace, device::Tier::host);
}

}  // namespace sherd::tensor::meta

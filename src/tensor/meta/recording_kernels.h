#pragma once

#include <memory>

#include "tensor/kernel_list.h"
#include "tensor/kernel_work.h"
#include "tensor/kernels.h"

namespace sherd::tensor {
struct DeltaExtents;
}

namespace sherd::tensor::meta {

/// Kernels that tell of each call what it does, and pass it on to others: on a meta device a pass tells its
/// work without computing anything. A batch's values are not looked at, so documents count as one text, and
/// keys that texts have stored count as all that their memory holds.
class RecordingKernels final : public ForwardingKernels<RecordingKernels> {
 public:
  RecordingKernels(std::unique_ptr<Kernels> inner, TellKernelWork tell)
      : inner_(std::move(inner)), tell_(std::move(tell)) {}

  Device& device() override { return inner_->device(); }
  bool folds_gradients() const override { return inner_->folds_gradients(); }
  bool multiplies_stored() const override { return inner_->multiplies_stored(); }
  void require_fp8(const Fp8Recipe& recipe) const override { inner_->require_fp8(recipe); }

  template <class Kernel, class... Args>
  void forward(KernelFamily family, Kernel kernel, Args&... args) {
    KernelWork work{.family = family};
    (add(work, args), ...);
    tell(work);
    (inner_.get()->*kernel)(args...);
  }

  SHERD_DECLARE_KERNEL(matmul)
  SHERD_DECLARE_KERNEL(to_fp8)
  SHERD_DECLARE_KERNEL(copy_rows)
  SHERD_DECLARE_KERNEL(copy_strided)
  SHERD_DECLARE_KERNEL(embedding)
  SHERD_DECLARE_KERNEL(embedding_backward)
  SHERD_DECLARE_KERNEL(attention)
  SHERD_DECLARE_KERNEL(attention_backward)
  SHERD_DECLARE_KERNEL(attend_stored)
  SHERD_DECLARE_KERNEL(delta_rule)
  SHERD_DECLARE_KERNEL(delta_rule_backward)
  SHERD_DECLARE_KERNEL(route)
  SHERD_DECLARE_KERNEL(combine_rows)
  SHERD_DECLARE_KERNEL(combine_rows_backward)

 private:
  void tell_delta(KernelWork work, const DeltaExtents& e);
  static void add(KernelWork& work, const Tensor& x) {
    if (work.bytes == 0 && x.defined()) work.dtype = x.dtype();
    work.bytes += static_cast<double>(x.bytes());
  }
  static void add(KernelWork& work, std::span<const Tensor> all) {
    for (const Tensor& x : all) add(work, x);
  }
  static void add(KernelWork& work, const Fp8Matrix& x) { add(work, x.codes), add(work, x.scales); }
  template <class Other>
  static void add(KernelWork&, const Other&) {}
  void tell(const KernelWork& work) {
    if (work.bytes > 0) tell_(work);
  }
  void tell_attention(KernelWork work, const Tensor& qkv, const Attention& geometry);

  std::unique_ptr<Kernels> inner_;
  TellKernelWork tell_;
};

}  // namespace sherd::tensor::meta

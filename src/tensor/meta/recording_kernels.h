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

  void matmul(const Matmul& args) override;
  void to_fp8(const Tensor& x, bool transposed, const Fp8Matrix& to, const Tensor& lost) override;
  void copy_rows(const StridedRows& from, const StridedRows& to, std::int64_t rows, std::int64_t columns,
                 bool accumulate) override;
  void copy_strided(const Tensor& from, const Strides& strides, const Tensor& to) override;
  void embedding(const Tensor& ids, const Tensor& table, const Tensor& out, const VocabSlice& slice) override;
  void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable, bool accumulate,
                          const VocabSlice& slice, std::optional<DType> fold) override;
  void attention(const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse) override;
  void attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse,
                          const Tensor& dout, const Tensor& dqkv) override;
  void attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store, const Tensor& sinks,
                     const Tensor& out) override;
  void delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule, const StateStore& store,
                  const Tensor& states, const Tensor& out) override;
  void delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                           const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                           const Tensor& dgates) override;
  void route(const Tensor& logits, const Tensor& bias, const Routing& routing, const Tensor& scores,
             const Tensor& chosen, const Tensor& weights) override;
  void combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                    const Tensor& out) override;
  void combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                             const Tensor& dout, const Tensor& drows, const Tensor& dweights) override;

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

#pragma once

#include "base/cpu_isa.h"
#include "tensor/cpu/isa/tables.h"
#include "tensor/extents.h"
#include "tensor/kernel_list.h"

namespace sherd::tensor::cpu {

/// Kernels for a CPU arena. Each family lives in a file of its own in this folder; vectorised inner loops are
/// compiled once per instruction set from isa/. Thread-safe in so far as the arena is: the object holds no
/// mutable state but caches.
class CpuKernels final : public Kernels {
 public:
  /// `isa` chooses the vector loops; it must be one that this processor has.
  explicit CpuKernels(Device& device, CpuIsa isa = cpu_isa()) : device_(device), isa_(isa_table(isa)) {}

  Device& device() override { return device_; }
  bool folds_gradients() const override { return true; }
  bool multiplies_stored() const override { return true; }

  SHERD_KERNELS(SHERD_DECLARE_KERNEL)

 private:
  Device& device_;
  const IsaTable& isa_;
  RotaryTables angles_;
};

// Bytes of Category::workspace that the CPU kernels hold at most during one call, with every thread of the
// device at work: what a meta device charges in their place. Each function stands beside its kernel and
// shares its plan. No tensor is read.

std::size_t matmul_workspace(Device& device, const Matmul& args);
std::size_t sum_rows_workspace(const Tensor& x, const Tensor& out);
/// layer_norm_backward and rms_norm_backward.
std::size_t norm_backward_workspace(const Tensor& x, const Tensor& dweight, const Tensor& dbias);
std::size_t attention_workspace(Device& device, const Tensor& qkv, const Attention& geometry);
std::size_t attention_backward_workspace(Device& device, const Tensor& qkv, const Attention& geometry);
std::size_t attend_stored_workspace(Device& device, const Tensor& qkv, const Attention& geometry,
                                    const KeyStore& store, const Tensor& sinks, const Tensor& out);

}  // namespace sherd::tensor::cpu

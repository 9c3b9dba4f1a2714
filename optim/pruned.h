#pragma once

#include <cstdint>

#include "base/arena.h"
#include "base/dtype.h"
#include "tensor/formats/pruned.h"

namespace sherd::device {
class Device;
}

// Pruned weights, and no others, are −0 (tensor/formats/pruned.h) after any update of theirs too: a rule
// may move a weight without a gradient (Muon's orthogonal directions, one bit of momentum), lose the sign of
// a zero, or end at −0 by chance. While the update runs, the gradient remembers which weights are pruned.
namespace sherd::optim {

/// A run of weights as SpanUpdate has them, with their gradients.
struct PrunedSpan {
  float* master = nullptr;       ///< null with split masters
  std::uint16_t* low = nullptr;  ///< of split masters, whose high halves are `param`
  void* param = nullptr;         ///< 16-bit parameter; null where there is none
  void* grad = nullptr;
  DType grad_dtype = DType::f32;  ///< f32, bf16 or f16
  std::int64_t n = 0;
};

/// Before the update: gradients of pruned weights become −0, and −0 among the others' +0.
void mark_pruned(const PrunedSpan& span, Arena& arena);
void mark_pruned(const PrunedSpan& span, device::Device& device);
/// After it: weights whose gradient is −0 become −0, and others that are −0 become +0; likewise their 16-bit
/// copies, where small ones may have rounded to it.
void restore_pruned(const PrunedSpan& span, Arena& arena);
void restore_pruned(const PrunedSpan& span, device::Device& device);

/// An element of such a span, on every device.
template <class Grad>
struct PrunedElement {
  using Half = std::uint16_t;
  float* master;
  Half* low;
  Half* param;
  Grad* grad;  ///< bits

  constexpr void mark(std::int64_t i) const {
    constexpr Grad pruned = tensor::pruned_bits<Grad>;
    const bool is = low ? param[i] == tensor::pruned_bits<Half> && low[i] == 0
                        : std::bit_cast<std::uint32_t>(master[i]) == tensor::pruned_bits<std::uint32_t>;
    grad[i] = is ? pruned : grad[i] == pruned ? Grad{0} : grad[i];
  }
  constexpr void restore(std::int64_t i) const {
    constexpr Half none = tensor::pruned_bits<Half>;
    const bool pruned = grad[i] == tensor::pruned_bits<Grad>;
    if (low) low[i] = pruned || param[i] == none ? Half{0} : low[i];
    if (param) param[i] = pruned ? none : param[i] == none ? Half{0} : param[i];
    if (low) return;
    const auto weight = std::bit_cast<std::uint32_t>(master[i]);
    constexpr std::uint32_t zero = tensor::pruned_bits<std::uint32_t>;
    master[i] = std::bit_cast<float>(pruned ? zero : weight == zero ? 0u : weight);
  }
};

}  // namespace sherd::optim

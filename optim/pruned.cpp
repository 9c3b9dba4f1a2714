#include "optim/pruned.h"

#include "base/error.h"
#include "device/device.h"
#include "optim/cuda/dispatch.h"

namespace sherd::optim {
namespace {

constexpr std::int64_t pruned_grain = 1 << 16;

/// Calls visit(element, begin, end) in parallel.
template <class Visit>
void over_elements(const PrunedSpan& span, Arena& arena, const Visit& visit) {
  require(span.n == 0 || (span.grad && (span.low ? span.param != nullptr : span.master != nullptr)),
          "pruned weights: no memory for ", span.n, " elements");
  const auto run = [&](auto bits) {
    using Grad = decltype(bits);
    const PrunedElement<Grad> element{span.master, span.low, static_cast<std::uint16_t*>(span.param),
                                      static_cast<Grad*>(span.grad)};
    arena.parallel_for(span.n, pruned_grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) visit(element, i);
    });
  };
  span.grad_dtype == DType::f32 ? run(std::uint32_t{}) : run(std::uint16_t{});
}

}  // namespace

void mark_pruned(const PrunedSpan& span, Arena& arena) {
  over_elements(span, arena, [](const auto& element, std::int64_t i) { element.mark(i); });
}

void mark_pruned(const PrunedSpan& span, device::Device& device) {
  on_gpu(device, span.grad) ? mark_pruned_on_gpu(device, span) : mark_pruned(span, device.arena());
}

void restore_pruned(const PrunedSpan& span, Arena& arena) {
  over_elements(span, arena, [](const auto& element, std::int64_t i) { element.restore(i); });
}

void restore_pruned(const PrunedSpan& span, device::Device& device) {
  on_gpu(device, span.grad) ? restore_pruned_on_gpu(device, span) : restore_pruned(span, device.arena());
}

}  // namespace sherd::optim

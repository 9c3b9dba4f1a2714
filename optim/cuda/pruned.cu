#include "optim/cuda/kernels.h"
#include "optim/cuda/streams.cuh"

namespace sherd::optim::SHERD_CUDA {
namespace {

template <class Grad>
__global__ void mark_kernel(PrunedElement<Grad> element, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) element.mark(i);
}
template <class Grad>
__global__ void restore_kernel(PrunedElement<Grad> element, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) element.restore(i);
}

template <class Grad>
PrunedElement<Grad> element_of(const PrunedSpan& span) {
  return {span.master, span.low, static_cast<std::uint16_t*>(span.param), static_cast<Grad*>(span.grad)};
}

template <class Grad>
void queue_pruned(const Target& target, void (*kernel)(PrunedElement<Grad>, Count), const PrunedSpan& span) {
  if (span.n == 0) return;
  launch(kernel, blocks_for(span.n, threads, target.processors), threads, 0, target.stream,
         element_of<Grad>(span), span.n);
}

}  // namespace

void mark_pruned(const Target& target, const PrunedSpan& span) {
  span.grad_dtype == DType::f32 ? queue_pruned<std::uint32_t>(target, mark_kernel, span)
                                : queue_pruned<std::uint16_t>(target, mark_kernel, span);
}

void restore_pruned(const Target& target, const PrunedSpan& span) {
  span.grad_dtype == DType::f32 ? queue_pruned<std::uint32_t>(target, restore_kernel, span)
                                : queue_pruned<std::uint16_t>(target, restore_kernel, span);
}

}  // namespace sherd::optim::SHERD_CUDA

#include "simt/emulated.h"

#include <vector>

#include "optim/cuda/kernels.h"
#include "tensor/cuda/attention/attention_library.h"
#include "tensor/cuda/cuda_kernels.h"

namespace sherd::test {
namespace {

// Few processors, so that loops that stride over the grid go round more than once.
device::SHERD_CUDA::Target target_on(device::Device& device, device::StreamQueue* stream = nullptr) {
  return {device, stream, 1, simt::shared_limit()};
}

}  // namespace

std::unique_ptr<tensor::Kernels> make_emulated_kernels(device::Device& device, device::StreamQueue* stream,
                                                       int capability) {
  auto target = target_on(device, stream);
  target.capability = capability;
  return std::make_unique<tensor::SHERD_CUDA::CudaKernels>(target);
}

void check_emulated_data(tensor::Kernels& kernels) {
  static_cast<tensor::SHERD_CUDA::CudaKernels&>(kernels).check_data();
}

void emulated_regroup(const tensor::AttentionExtents& e, const void* from, void* to, std::int64_t rows,
                      bool by_group, device::Device& device) {
  tensor::SHERD_CUDA::regroup_heads(target_on(device), e, from, to, rows, by_group);
}

bool emulated_update(std::span<const optim::SpanUpdate> spans, const optim::Hyper& hyper, std::int64_t step,
                     device::Device& device) {
  unsigned not_finite = 0;
  std::vector<optim::PlannedSpan> planned;
  for (const optim::SpanUpdate& span : spans) planned.push_back({optim::plan_span(span, hyper, step), span});
  optim::SHERD_CUDA::update(target_on(device), planned, &not_finite);
  return not_finite == 0;
}
void emulated_split_master(const float* master, void* high, std::uint16_t* low, std::int64_t n,
                           device::Device& device) {
  optim::SHERD_CUDA::split_master(target_on(device), master, high, low, n);
}
void emulated_join_master(const void* high, const std::uint16_t* low, float* master, std::int64_t n,
                          device::Device& device) {
  optim::SHERD_CUDA::join_master(target_on(device), high, low, master, n);
}
void emulated_round_masters(const float* master, void* to, DType dtype, std::int64_t n,
                            device::Device& device) {
  optim::SHERD_CUDA::round_masters(target_on(device), master, to, dtype, n);
}
void emulated_mark_pruned(const optim::PrunedSpan& span, device::Device& device) {
  optim::SHERD_CUDA::mark_pruned(target_on(device), span);
}
void emulated_restore_pruned(const optim::PrunedSpan& span, device::Device& device) {
  optim::SHERD_CUDA::restore_pruned(target_on(device), span);
}

void emulated_compress(const optim::MomentumSpan& span, device::Device& device) {
  optim::SHERD_CUDA::compress_momentum(target_on(device), span);
}
void emulated_average(const optim::SentMomentum& sent, float* error, std::uint64_t* result, std::int64_t n,
                      device::Device& device) {
  optim::SHERD_CUDA::average_momentum(target_on(device), sent, error, result, n);
}
void emulated_settle(float* error, float scale, std::int64_t n, device::Device& device) {
  optim::SHERD_CUDA::settle_error(target_on(device), error, scale, n);
}
void emulated_take(const optim::AgreedMomentum& agreed, const float* variance, float* momentum,
                   std::int64_t n, device::Device& device) {
  optim::SHERD_CUDA::take_momentum(target_on(device), agreed, variance, momentum, n);
}
void emulated_refresh(const optim::FrozenLamb& rule, const optim::SpanUpdate& span,
                      const optim::AgreedMomentum* agreed, const float* weights, float* fresh, bool first,
                      const optim::RefreshResults& results, device::Device& device) {
  optim::SHERD_CUDA::refresh_variance(target_on(device), rule, span, agreed, weights, fresh, first, results);
}

}  // namespace sherd::test

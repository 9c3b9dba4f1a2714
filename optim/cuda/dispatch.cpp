#include "optim/cuda/dispatch.h"

#include "device/cuda/cuda_device.h"
#include "optim/cuda/kernels.h"

namespace sherd::optim {
namespace {

SHERD_CUDA::Target target_of(device::Device& device) {
  device::CudaDevice& gpu = device::as_cuda(device);
  return {device, &gpu.compute_stream().queue(), gpu.gpu().processors};
}

}  // namespace

bool on_gpu(device::Device& device, const void* memory) {
  if (device.kind() != device::Kind::cuda) return false;
  device::CudaDevice& gpu = device::as_cuda(device);
  return gpu.gpu().processors > 0 && gpu.in_gpu_memory(memory);
}

void update_on_gpu(device::Device& device, std::span<const PlannedSpan> spans, unsigned* not_finite) {
  SHERD_CUDA::update(target_of(device), spans, not_finite);
}
void split_on_gpu(device::Device& device, const float* master, void* high, std::uint16_t* low,
                  std::int64_t n) {
  SHERD_CUDA::split_master(target_of(device), master, high, low, n);
}
void join_on_gpu(device::Device& device, const void* high, const std::uint16_t* low, float* master,
                 std::int64_t n) {
  SHERD_CUDA::join_master(target_of(device), high, low, master, n);
}
void refresh_on_gpu(device::Device& device, const FrozenLamb& rule, const SpanUpdate& span,
                    const AgreedMomentum* agreed, const float* weights, float* fresh, bool first,
                    const RefreshResults& results) {
  SHERD_CUDA::refresh_variance(target_of(device), rule, span, agreed, weights, fresh, first, results);
}
void compress_on_gpu(device::Device& device, const MomentumSpan& span) {
  SHERD_CUDA::compress_momentum(target_of(device), span);
}
void average_on_gpu(device::Device& device, const SentMomentum& sent, float* error, std::uint64_t* result,
                    std::int64_t n) {
  SHERD_CUDA::average_momentum(target_of(device), sent, error, result, n);
}
void settle_on_gpu(device::Device& device, float* error, float scale, std::int64_t n) {
  SHERD_CUDA::settle_error(target_of(device), error, scale, n);
}
void take_on_gpu(device::Device& device, const AgreedMomentum& agreed, const float* variance, float* momentum,
                 std::int64_t n) {
  SHERD_CUDA::take_momentum(target_of(device), agreed, variance, momentum, n);
}
void mark_pruned_on_gpu(device::Device& device, const PrunedSpan& span) {
  SHERD_CUDA::mark_pruned(target_of(device), span);
}
void restore_pruned_on_gpu(device::Device& device, const PrunedSpan& span) {
  SHERD_CUDA::restore_pruned(target_of(device), span);
}
void round_on_gpu(device::Device& device, const float* master, void* to, DType dtype, std::int64_t n) {
  SHERD_CUDA::round_masters(target_of(device), master, to, dtype, n);
}

}  // namespace sherd::optim

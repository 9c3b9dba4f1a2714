#include "base/error.h"
#include "optim/cuda/dispatch.h"

namespace sherd::optim {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorKind::usage, "optim: this build has no kernels for CUDA");
}

}  // namespace

bool on_gpu(device::Device&, const void*) {
  return false;
}
void update_on_gpu(device::Device&, std::span<const PlannedSpan>, unsigned*) {
  refuse();
}
void split_on_gpu(device::Device&, const float*, void*, std::uint16_t*, std::int64_t) {
  refuse();
}
void join_on_gpu(device::Device&, const void*, const std::uint16_t*, float*, std::int64_t) {
  refuse();
}
void refresh_on_gpu(device::Device&, const FrozenLamb&, const SpanUpdate&, const AgreedMomentum*,
                    const float*, float*, bool, const RefreshResults&) {
  refuse();
}
void compress_on_gpu(device::Device&, const MomentumSpan&) {
  refuse();
}
void average_on_gpu(device::Device&, const SentMomentum&, float*, std::uint64_t*, std::int64_t) {
  refuse();
}
void settle_on_gpu(device::Device&, float*, float, std::int64_t) {
  refuse();
}
void take_on_gpu(device::Device&, const AgreedMomentum&, const float*, float*, std::int64_t) {
  refuse();
}
void mark_pruned_on_gpu(device::Device&, const PrunedSpan&) {
  refuse();
}
void restore_pruned_on_gpu(device::Device&, const PrunedSpan&) {
  refuse();
}
void round_on_gpu(device::Device&, const float*, void*, DType, std::int64_t) {
  refuse();
}

}  // namespace sherd::optim

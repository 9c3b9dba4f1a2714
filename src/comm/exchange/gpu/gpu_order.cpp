#include "comm/exchange/gpu/gpu_order.h"

namespace sherd::comm {

void GpuOrder::admit(Call& call) const {
  // By its storage: a view may begin where its storage ends, when it is empty.
  for_each_tensor(call, [&](const Tensor& x) {
    (gpu_->in_gpu_memory(x.storage().data()) ? call.gpu : call.host) = true;
  });
  if (call.gpu || call.host) call.ready = gpu_->compute_stream().record();
}

void GpuOrder::before(const Call& call) const {
  if (!call.gpu) call.ready.wait(gpu_->deadline(), describe(call));
}

void GpuOrder::settle(Call& call) const {
  if (!call.done) return;
  gpu_->compute_stream().wait(call.done);
  if (call.host) call.done.wait(gpu_->deadline(), describe(call));
  call.done = {};
  call.staging.clear();
}

void outlast(Call& call) noexcept {
  if (!call.done) return;
  std::vector<device::Storage> memory;
  for_each_tensor(call, [&](const Tensor& x) { memory.push_back(x.storage()); });
  for (const Tensor& x : call.staging) memory.push_back(x.storage());
  const device::StreamUse waits(std::exchange(call.done, {}), std::move(memory));
}

}  // namespace sherd::comm

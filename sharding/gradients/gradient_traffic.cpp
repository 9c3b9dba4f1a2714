#include "sharding/gradients/gradient_traffic.h"

#include <algorithm>

namespace sherd::sharding {
namespace {
/// A buffer opened by the last call is being added to, one of the call before may still be on its way.
constexpr std::int64_t opens_between = 3;
}  // namespace

GradientTraffic::GradientTraffic(device::Device& device) : device_(device), gpu_(device.accelerator()) {
  if (!gpu_) return;
  coming_ = gpu_->make_stream();
  going_ = gpu_->make_stream();
}

GradientTraffic::~GradientTraffic() {
  try {
    join();
  } catch (const Error&) {
    // The device has failed; whoever uses it next is told.
  }
}

/// The one that was opened longest ago, or a new one while that would have to be waited for.
GradientTraffic::StagingBuffer& GradientTraffic::free_buffer(std::int64_t numel, DType dtype) {
  auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const auto& b) {
    return !b->lent && b->memory.numel() == numel && b->memory.dtype() == dtype;
  });
  ++opens_;
  if (found == buffers_.end() || opens_ - (*found)->opened < opens_between) {
    auto buffer = std::make_shared<StagingBuffer>();
    buffer->memory = Tensor::empty(device_, {numel}, dtype, device::Category::communication);
    if (gpu_) buffer->idle = gpu_->compute_stream().record();  // in whose order allocators reuse memory
    found = buffers_.insert(buffers_.begin(), std::move(buffer));
  }
  (*found)->opened = opens_;
  std::rotate(found, found + 1, buffers_.end());
  return *buffers_.back();
}

std::shared_ptr<const Tensor> GradientTraffic::open(const Segment& segment, bool load) {
  StagingBuffer& buffer = free_buffer(segment.layout().padded(), segment.gradients().dtype());
  buffer.lent = true, buffer.sent = false;
  if (!gpu_) return {&buffer.memory, [held = buffers_.back()](const Tensor*) { held->lent = false; }};
  if (load) {
    // It waits for nothing of the compute stream but the buffer's last user: so it runs ahead of backward.
    coming_.wait(buffer.idle);
    coming_.wait(segment.gradients_arrived(segment.layout().padded()));
    gpu_->copy_on(coming_, buffer.memory.raw(), segment.gradients().tensor().raw(), buffer.memory.bytes());
    gpu_->compute_stream().wait(coming_.record());
  } else {
    gpu_->compute_stream().wait(buffer.idle);
  }
  return {&buffer.memory, [held = buffers_.back(), compute = gpu_->compute_stream()](const Tensor*) mutable {
            held->lent = false;
            try {
              if (!held->sent) held->idle = compute.record();
            } catch (const Error&) {
              held->lent = true;  // the device has failed: nobody gets it any more
            }
          }};
}

void GradientTraffic::send(Segment& segment, const Tensor& full, std::int64_t part_elements) {
  if (!gpu_) return;
  const auto buffer = std::find_if(buffers_.begin(), buffers_.end(),
                                   [&](const auto& b) { return b->memory.raw() == full.raw(); });
  require(buffer != buffers_.end(), "gradients that did not come from here cannot be sent");
  going_.wait(gpu_->compute_stream().record());
  std::vector<Segment::GradientArrival> arrivals;
  const std::int64_t all = full.numel();
  for (std::int64_t at = 0; at < all; at += part_elements) {
    const std::int64_t end = std::min(all, at + part_elements);
    const Tensor from = full.range(at, end);
    gpu_->copy_on(going_, segment.gradients().tensor().range(at, end).raw(), from.raw(), from.bytes());
    arrivals.push_back({end, going_.record()});
  }
  (*buffer)->idle = arrivals.back().event;
  (*buffer)->sent = true;
  segment.gradients_arrive(std::move(arrivals));
}

void GradientTraffic::join() {
  if (!gpu_) return;
  for (device::Stream* stream : {&coming_, &going_}) gpu_->compute_stream().wait(stream->record());
}

}  // namespace sherd::sharding

#include "engine/update/update_staging.h"

#include <algorithm>

#include "device/trace_range.h"

namespace sherd::engine {

using device::Event;
using device::Tier;
using sharding::Segment;
using tensor::Tensor;

namespace {

bool with_gpu(const sharding::StateBuffer& state) {
  return state.tier() == Tier::device;
}

}  // namespace

UpdateStaging::UpdateStaging(device::Accelerator& device, std::int64_t part_elements)
    : device_(device),
      part_elements_(part_elements),
      fetching_(device.make_stream()),
      sending_(device.make_stream()) {}

bool UpdateStaging::by_processor(const Segment& segment) {
  if (!segment.moments().empty()) return !with_gpu(segment.moments().front());
  return !with_gpu(segment.masters() ? segment.masters() : segment.parameters());
}

void UpdateStaging::charge(device::Device& device, const UpdateView& view, std::int64_t part_elements) {
  std::vector<device::Storage> held;
  const auto room = [&](const sharding::StateBuffer& state) {
    if (with_gpu(state))
      held.push_back(device.allocate(static_cast<std::size_t>(part_elements) * size_of(state.dtype()),
                                     device::Category::workspace, Tier::host));
  };
  for (int slot = 0; slot < slot_count; ++slot)
    room(view.segment->gradients()), room(view.segment->parameters());
}

void UpdateStaging::announce(const UpdateView& view, const Event& ready) {
  const std::int64_t all = view.gradients.numel();
  for (std::int64_t at = 0; at < all; at += part_elements_) {
    const std::int64_t end = std::min(all, at + part_elements_);
    parts_.push_back({view.part(view.begin + at, view.begin + end), {}, ready, nullptr, end == all});
  }
  fetch_ahead();
}

/// One part more than the one that is updated next: the third slot's parameters are still on their way back.
void UpdateStaging::fetch_ahead() {
  for (; fetched_ < std::min<std::size_t>(2, parts_.size()); ++fetched_) {
    parts_[fetched_].slot = &slots_[next_slot_++ % slots_.size()];
    fetch(parts_[fetched_]);
  }
}

/// As many elements as `like` has, in a slot's memory.
Tensor UpdateStaging::room(device::Storage& storage, const Tensor& like) {
  const std::size_t bytes = static_cast<std::size_t>(part_elements_) * size_of(like.dtype());
  if (storage.bytes() < bytes) {
    join();  // an earlier part may still be using what is freed here
    storage = device_.allocate(bytes, device::Category::workspace, Tier::host);
  }
  return Tensor::view_of(storage, 0, {like.numel()}, like.dtype());
}

void UpdateStaging::fetch(StagedPart& part) {
  const Segment& segment = *part.there.segment;
  StagingSlot& slot = *part.slot;
  part.staged = part.there;
  fetching_.wait(slot.sent);  // of the slot's last part
  // The processor waits for these too where gradients come to the host tier by themselves.
  fetching_.wait(part.ready);
  fetching_.wait(segment.gradients_arrived(part.there.begin + part.there.gradients.numel()));
  if (with_gpu(segment.gradients())) {
    part.staged.gradients = room(slot.gradients, part.there.gradients);
    device_.copy_on(fetching_, part.staged.gradients.raw(), part.there.gradients.raw(),
                    part.there.gradients.bytes());
  }
  if (with_gpu(segment.parameters())) {
    part.staged.parameters = room(slot.parameters, part.there.parameters);
    if (segment.master_form() != sharding::MasterForm::separate)
      device_.copy_on(fetching_, part.staged.parameters.raw(), part.there.parameters.raw(),
                      part.there.parameters.bytes());
  }
  slot.fetched = fetching_.record();
}

void UpdateStaging::send(const StagedPart& part) {
  if (!with_gpu(part.there.segment->parameters())) return;
  sending_.wait(part.ready);  // work that was queued before it still reads the old parameters
  // Without the padding, of which the slot knows nothing.
  const std::int64_t begin = part.there.begin, count = part.there.parameters.numel();
  for (const sharding::Piece& piece : part.there.segment->layout().pieces(begin, begin + count)) {
    const std::int64_t at = piece.flat_begin - begin, end = at + piece.count;
    const Tensor to = part.there.parameters.range(at, end);
    device_.copy_on(sending_, to.raw(), part.staged.parameters.range(at, end).raw(), to.bytes());
  }
  part.slot->sent = sending_.record();
}

bool UpdateStaging::run(const std::function<bool(const UpdateView&)>& update, bool changes) {
  const device::TraceRange range("offload", parts_.empty() ? "" : parts_.front().there.segment->name());
  bool finite = true, last = parts_.empty();
  while (!last) {
    const StagedPart part = parts_.front();
    part.slot->fetched.wait(device_.deadline(), "the gradients' way to the host");
    finite = update(part.staged) && finite;
    if (changes) send(part);
    last = part.last;
    parts_.pop_front();
    --fetched_;
    fetch_ahead();
  }
  return finite;
}

void UpdateStaging::join() {
  for (device::Stream* stream : {&fetching_, &sending_}) device_.compute_stream().wait(stream->record());
}

void UpdateStaging::end_series() noexcept {
  parts_.clear();
  fetched_ = 0;
  try {
    join();
  } catch (const Error&) {
    // The device has failed; whoever uses it next is told.
  }
  for (StagingSlot& slot : slots_) slot = {};
}

}  // namespace sherd::engine

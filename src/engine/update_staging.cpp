#include "engine/update_staging.h"

#include <algorithm>

#include "device/trace_range.h"

namespace sherd::engine {

using device::Mark;
using device::Tier;
using sharding::Segment;
using tensor::Tensor;

namespace {

bool with_gpu(const sharding::StateBuffer& state) {
  return state.tier() == Tier::device;
}

/// Whether the processor updates `segment`: where the states that only the optimizer reads are.
bool by_processor(const Segment& segment) {
  if (!segment.moments().empty()) return !with_gpu(segment.moments().front());
  return !with_gpu(segment.masters() ? segment.masters() : segment.parameters());
}

Tensor range_of(const Tensor& x, std::int64_t begin, std::int64_t end) {
  return x.defined() ? x.range(begin, end) : Tensor();
}

UpdateView part_of(const UpdateView& view, std::int64_t begin, std::int64_t end) {
  UpdateView part;
  part.segment = view.segment;
  part.begin = view.begin + begin;
  part.parameters = view.parameters.range(begin, end);
  part.gradients = view.gradients.range(begin, end);
  part.masters = range_of(view.masters, begin, end);
  for (const Tensor& moment : view.moments) part.moments.push_back(moment.range(begin, end));
  return part;
}

}  // namespace

/// Page-locked memory of one part under way. Three: one comes, one is updated, one goes.
struct UpdateStaging::Slot {
  Tensor gradients, parameters;  ///< undefined where the processor reads the states themselves
  Mark fetched, sent;
};

/// Lets the compute stream wait for both others in the end, however it comes: then the slots' memory may be
/// reused.
class UpdateStaging::Joined {
 public:
  explicit Joined(UpdateStaging& staging) : staging_(staging) {}
  ~Joined() {
    try {
      for (device::Stream* stream : {&staging_.fetching_, &staging_.sending_})
        staging_.device_.compute_stream().wait(stream->mark());
    } catch (const Error&) {
      // The device has failed; whoever uses it next is told.
    }
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

 private:
  UpdateStaging& staging_;
};

UpdateStaging::UpdateStaging(device::CudaDevice& device)
    : device_(device), fetching_(device.make_stream()), sending_(device.make_stream()) {}

bool UpdateStaging::needed_for(const Segment& segment) {
  return by_processor(segment) && (with_gpu(segment.gradients()) || with_gpu(segment.parameters()));
}

UpdateStaging::Slots UpdateStaging::make_slots(device::Device& device, const UpdateView& view,
                                               std::int64_t part_elements) {
  const std::int64_t all = view.gradients.numel(), step = std::min(all, part_elements);
  const auto room = [&](const Tensor& like) {
    return Tensor::empty(device, {step}, like.dtype(), device::Category::workspace, Tier::host);
  };
  Slots slots;
  std::int64_t begin = 0;
  for (Slot& slot : slots) {
    if (begin >= all) break;
    if (with_gpu(view.segment->gradients())) slot.gradients = room(view.gradients);
    if (with_gpu(view.segment->parameters())) slot.parameters = room(view.parameters);
    begin += step;
  }
  return slots;
}

void UpdateStaging::book(device::Device& device, const UpdateView& view, std::int64_t part_elements) {
  make_slots(device, view, part_elements);
}

bool UpdateStaging::run(const UpdateView& view, const std::function<bool(const UpdateView&)>& update,
                        std::int64_t part_elements) {
  const Segment& segment = *view.segment;
  const device::TraceRange range("offload", segment.name());
  const std::int64_t all = view.gradients.numel(), step = std::min(all, part_elements);
  const std::int64_t parts = step == 0 ? 0 : (all + step - 1) / step;
  const bool gradients_there = with_gpu(segment.gradients()),
             parameters_there = with_gpu(segment.parameters());
  const bool parameters_read = parameters_there && segment.master_form() != sharding::MasterForm::separate;

  Slots slots = make_slots(device_, view, part_elements);
  const Joined joined(*this);
  const Mark ready = device_.compute_stream().mark();
  fetching_.wait(
      ready);  // and so does the processor, also for gradients that come to the host tier by themselves
  sending_.wait(ready);  // work that was queued before still reads the old parameters

  const auto slot_of = [&](std::int64_t i) -> Slot& {
    return slots[static_cast<std::size_t>(i) % slots.size()];
  };
  const auto fetch = [&](std::int64_t i) {
    Slot& slot = slot_of(i);
    const UpdateView part = part_of(view, i * step, std::min(all, (i + 1) * step));
    fetching_.wait(slot.sent);  // of an earlier part
    if (gradients_there)
      device_.copy_on(fetching_, slot.gradients.raw(), part.gradients.raw(), part.gradients.bytes());
    if (parameters_read)
      device_.copy_on(fetching_, slot.parameters.raw(), part.parameters.raw(), part.parameters.bytes());
    slot.fetched = fetching_.mark();
  };
  bool finite = true;
  if (parts > 0) fetch(0);
  for (std::int64_t i = 0; i < parts; ++i) {
    if (i + 1 < parts) fetch(i + 1);
    Slot& slot = slot_of(i);
    UpdateView part = part_of(view, i * step, std::min(all, (i + 1) * step));
    const Tensor parameters = part.parameters;
    if (gradients_there) part.gradients = slot.gradients.range(0, part.gradients.numel());
    if (parameters_there) part.parameters = slot.parameters.range(0, parameters.numel());
    slot.fetched.wait(device_.deadline(), "the gradients' way to the host");
    finite = update(part) && finite;
    if (!parameters_there) continue;
    // Without the padding, of which the slot knows nothing.
    for (const sharding::Piece& piece :
         segment.layout().pieces(part.begin, part.begin + parameters.numel())) {
      const std::int64_t begin = piece.flat_begin - part.begin;
      const Tensor to = parameters.range(begin, begin + piece.count);
      device_.copy_on(sending_, to.raw(), part.parameters.range(begin, begin + piece.count).raw(),
                      to.bytes());
    }
    slot.sent = sending_.mark();
  }
  return finite;
}

}  // namespace sherd::engine

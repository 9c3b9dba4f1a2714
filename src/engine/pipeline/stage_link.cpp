#include "engine/pipeline/stage_link.h"

#include <algorithm>
#include <vector>

namespace sherd::engine {

using autograd::Tape;
using autograd::Var;
using tensor::Tensor;

namespace {

int previous_stage(const comm::Communicator& group) {
  return (group.rank() + group.size() - 1) % group.size();
}

int behind(const comm::Communicator& group) {
  return (group.rank() + 1) % group.size();
}

}  // namespace

comm::CallOptions StageChannel::options(const Key& key, bool header) const {
  return {.label = cat(header ? "shape of the " : "", what_, " of micro-batch ", key.first, ", chunk ",
                       key.second),
          .scalar = header,
          .async = true};
}

void StageChannel::send(const Key& key, const Tensor& value) {
  collect_departures();
  const ValueForm form{value.shape(), value.dtype()};
  const auto [known, first] = sent_.emplace(key.second, form);
  if (first) {
    const Tensor header = make_header(device_);
    if (device_.kind() != device::Kind::meta) write_header(header, value);
    departures_.push_back({header, group_.send(header, to_, options(key, true))});
  }
  require(
      known->second == form, "the ", what_, " of micro-batch ", key.first, " is ", name_of(form.dtype), " ",
      form.shape.str(), ", and those before it in this step were ", name_of(known->second.dtype), " ",
      known->second.shape.str(),
      ": with a pipeline all micro-batches of a step have one shape; pad them, or give them in other steps");
  departures_.push_back({value, group_.send(value, to_, options(key, false))});
}

void StageChannel::receive(const Key& key) {
  bool first = announced_.insert(key.second).second;
  if (device_.kind() == device::Kind::meta) received_[key.second] = absent_(key.second), first = false;
  arrivals_.push_back({key, first ? make_header(device_) : Tensor()});
  begin_arrivals(nullptr);
}

/// Asks for all that can be asked for. Values are matched by order, so that what follows a header has to wait
/// until that has come: up to `needed` it is waited for.
void StageChannel::begin_arrivals(const Key* needed) {
  for (Arrival& arrival : arrivals_) {
    if (!arrival.value.defined()) {
      if (arrival.header.defined()) {
        if (!arrival.asked) arrival.work = group_.receive(arrival.header, from_, options(arrival.key, true));
        arrival.asked = true;
        if (!needed && !arrival.work.done()) return;
        arrival.work.wait();
        received_[arrival.key.second] = read_header(arrival.header);
        arrival.header = {};
      }
      const ValueForm& form = received_.at(arrival.key.second);
      const Tensor value = Tensor::empty(device_, form.shape, form.dtype);
      arrival.work = group_.receive(value, from_, options(arrival.key, false));
      arrival.value = value;
    }
    if (needed && arrival.key == *needed) needed = nullptr;
  }
}

Tensor StageChannel::take(const Key& key) {
  const auto at = std::find_if(arrivals_.begin(), arrivals_.end(),
                               [&](const Arrival& arrival) { return arrival.key == key; });
  require(at != arrivals_.end(), "the ", what_, " of micro-batch ", key.first, ", chunk ", key.second,
          " was not asked for: its receive comes before its use");
  begin_arrivals(&key);
  at->work.wait();
  const Tensor value = at->value;
  arrivals_.erase(at);
  return value;
}

/// On a GPU what has ended may have ended there only: wait() puts what this rank does next behind it.
void StageChannel::collect_departures() {
  for (; !departures_.empty() && departures_.front().work.done(); departures_.pop_front())
    departures_.front().work.wait();
}

void StageChannel::finish() {
  require(arrivals_.empty(), "a step has ended, and an ", what_, " that it received was not used");
  for (; !departures_.empty(); departures_.pop_front()) departures_.front().work.wait();
  sent_.clear();
  received_.clear();
  announced_.clear();
}

void StageChannel::abandon() noexcept {
  const auto end = [](comm::Work& work) {
    try {
      work.wait();
    } catch (...) {
      // The error that ended the step is the one to tell.
    }
  };
  for (Departure& departure : departures_) end(departure.work);
  for (Arrival& arrival : arrivals_) end(arrival.work);
  departures_.clear();
  arrivals_.clear();
  sent_.clear();
  received_.clear();
  announced_.clear();
}

StageLink::StageLink(device::Device& device, const StageLayout& layout, comm::ProcessGroups& groups)
    : pipeline_(groups.group(comm::Axis::pipeline)),
      activations_("activation", device, groups.another(comm::Axis::pipeline), previous_stage(pipeline_),
                   behind(pipeline_),
                   [&layout](int chunk) { return layout.given.at(layout.own(chunk).begin - 1); }),
      gradients_("gradient", device, groups.another(comm::Axis::pipeline), behind(pipeline_),
                 previous_stage(pipeline_),
                 [&layout](int chunk) { return layout.given.at(layout.own(chunk).end - 1); }) {}

void StageLink::finish() {
  activations_.finish();
  gradients_.finish();
}

void StageLink::abandon(const std::string& reason) noexcept {
  pipeline_.abort(reason);
  activations_.abandon();
  gradients_.abandon();
}

ModelStages::ModelStages(nn::LayeredModel& model, const StageLayout& layout, comm::Communicator& group)
    : model_(model), layout_(layout), group_(group) {
  model_.set_stages(this);
}

ModelStages::~ModelStages() {
  model_.set_stages(nullptr);
}

Var ModelStages::cross(Tape& tape, std::size_t part, const Var& x) {
  const int from = layout_.stage_of(part - 1), to = layout_.stage_of(part);
  if (from == to) return x;
  const comm::CallOptions options{.label = cat("what part ", part - 1, " of the model gives")},
      of_header{.label = options.label, .scalar = true};
  const Tensor header = make_header(tape.device());
  const bool absent = tape.device().kind() == device::Kind::meta;  // the other stages are
  if (from == layout_.stage) {
    if (!absent) write_header(header, x.value());
    group_.send(header, to, of_header);
    group_.send(x.value(), to, options);
    return {};
  }
  if (to != layout_.stage) return {};
  group_.receive(header, from, of_header);
  const ValueForm form = absent ? layout_.given.at(part - 1) : read_header(header);
  const Tensor value = tape.empty(form.shape, form.dtype);
  group_.receive(value, from, options);
  return tape.variable(value);
}

Tensor ModelStages::from_last(Tape& tape, const Tensor& value) {
  const int last = layout_.stages - 1;
  const comm::CallOptions options{.label = "what the last stage gives"},
      of_header{.label = options.label, .scalar = true};
  const Tensor header = make_header(tape.device());
  if (layout_.stage == last) write_header(header, value);
  group_.broadcast(header, last, of_header);
  const ValueForm form = read_header(header);
  const Tensor out = layout_.stage == last ? value : tape.empty(form.shape, form.dtype);
  group_.broadcast(out, last, options);
  return out;
}

}  // namespace sherd::engine

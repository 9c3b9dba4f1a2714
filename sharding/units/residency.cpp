#include "sharding/units/residency.h"

#include <algorithm>
#include <utility>

namespace sherd::sharding {

Unit& Residency::add_unit(std::string name, bool on_demand) {
  units_.push_back(
      std::make_unique<Unit>(static_cast<int>(units_.size()), std::move(name), *this, on_demand));
  return *units_.back();
}

GroupMemory& Residency::memory_of(comm::Communicator& group) {
  for (GroupMemory& memory : memories_)
    if (&memory.group == &group) return memory;
  return memories_.emplace_back(group, ExchangePool(group, device_), nullptr);
}

void Residency::make_readers(offload::Store* store, int buffers, std::int64_t elements) {
  for (const auto& unit : units_)
    for (const auto& segment : unit->segments()) memory_of(*segment->groups().shard);
  for (GroupMemory& memory : memories_) {
    memory.reader =
        std::make_unique<ParameterReader>(memory.group, device_, store, units_, buffers, elements);
    if (memory.reader->idle()) memory.reader.reset();
  }
}

void Residency::forget_reads() {
  announced_.clear();
  for (GroupMemory& memory : memories_)
    if (memory.reader) memory.reader->forget();
}

void Residency::forget_scales(bool trained) {
  for (const auto& unit : units_) unit->forget_scales(trained);
}

void Residency::begin_changes() {
  forget_scales(true);
  for (const auto& unit : units_) {
    unit->outdated_ = unit->trainable();
    unit->touched_ = false;
    unit->segments_to_change_ = static_cast<int>(std::count_if(
        unit->segments().begin(), unit->segments().end(), [](const auto& s) { return s->key().trainable; }));
  }
}

Unit& Residency::unit_of(const Segment& segment) const {
  for (const auto& unit : units_)
    for (const auto& own : unit->segments())
      if (own.get() == &segment) return *unit;
  fail(ErrorKind::usage, "segment '", segment.name(), "' does not belong to this model");
}

bool Residency::may_change(const Segment& segment) const {
  if (!segment.parameters().stored()) return true;
  const Unit& unit = unit_of(segment);
  return std::all_of(memories_.begin(), memories_.end(), [&](const GroupMemory& memory) {
    return !memory.reader || unit.stored_segments(memory.group).empty() || unit.touched_ ||
           memory.reader->awaits(unit);
  });
}

void Residency::changed(const Segment& segment, std::int64_t begin, const Tensor& to, bool last) {
  Unit& unit = unit_of(segment);
  if (segment.parameters().stored()) unit.touched_ = true;
  if (last) --unit.segments_to_change_;
  for (GroupMemory& memory : memories_) {
    if (!memory.reader) continue;
    if (to.defined() && segment.parameters().stored() && segment.groups().shard == &memory.group)
      memory.reader->hand_over(unit, segment, begin, to);
    if (unit.changed()) memory.reader->read_ahead();
  }
}

void Residency::end_changes(std::span<Unit* const> units) {
  for (Unit* unit : units) {
    require(unit->changed(), "parameters of '", unit->name(), "' are to change still");
    unit->outdated_ = false;
  }
  for (Unit* unit : std::exchange(put_off_, {})) {
    if (unit->outdated_)
      put_off_.push_back(unit);
    else if (following_ && unit->presence_ == Unit::Presence::absent)
      gather(*unit, true, exact_);
  }
}

bool Residency::changes() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->outdated_; });
}

void Residency::abandon_changes() noexcept {
  for (const auto& unit : units_) unit->outdated_ = false, unit->segments_to_change_ = 0;
  put_off_.clear();
}

void Residency::abandon() {
  put_off_.clear();
  for (const auto& unit : units_) {
    unit->stays_ = false;
    if (unit->leases_ == 0 && unit->presence_ != Unit::Presence::absent) drop(*unit);
  }
  forget_reads();
  mode_ = Mode::none;
  following_ = false;
}

void Residency::begin(Mode mode) {
  abandon();
  mode_ = mode;
  position_ = 0;
  recorded_.clear();
  following_ = trace().complete;
  if (!following_) return;
  for (GroupMemory& memory : memories_)
    if (memory.reader) memory.reader->expect(trace().order);
}

void Residency::begin_list(const std::vector<int>& order) {
  abandon();
  mode_ = Mode::list;
  for (GroupMemory& memory : memories_)
    if (memory.reader) memory.reader->expect(order);
}

void Residency::gather_ahead(Unit& unit) {
  require(!unit.outdated_, "parameters of '", unit.name(), "' are gathered before they have changed");
  if (unit.presence_ == Unit::Presence::absent) gather(unit, true);
}

void Residency::announce(Unit& unit) {
  if (unit.presence_ != Unit::Presence::absent || unit.gathered_elements() == 0 ||
      std::find(announced_.begin(), announced_.end(), &unit) != announced_.end())
    return;
  announced_.push_back(&unit);
  for (GroupMemory& memory : memories_)
    if (memory.reader) memory.reader->announce(unit);
}

void Residency::let_stay(Unit& unit, bool stays) {
  unit.stays_ = stays;
  if (!stays && unit.leases_ == 0 && unit.presence_ != Unit::Presence::absent) drop(unit);
}

/// While a unit on demand is in use, the one that comes behind it is gathered.
void Residency::gather_announced(const Unit& leased) {
  const auto at = std::find(announced_.begin(), announced_.end(), &leased);
  if (at != announced_.end()) announced_.erase(announced_.begin(), at + 1);
  while (!announced_.empty() && announced_.front()->presence_ != Unit::Presence::absent)
    announced_.pop_front();
  if (announced_.empty() || announced_.front()->outdated_ || limits_.prefetch_bucket == 0) return;
  Unit& next = *announced_.front();
  if (stats_.live + next.gathered_elements() <= limits_.max_live) gather(next, true, exact_);
}

void Residency::end() {
  if (following_ && position_ != trace().events.size()) {
    following_ = false;
    trace().complete = false;
    ++stats_.trace_breaks;
  }
  for (const auto& unit : units_)
    if (unit->leases_ == 0 && unit->presence_ != Unit::Presence::absent) drop(*unit);
  if (!following_ && mode_ != Mode::list) {
    std::vector<std::int64_t> sizes;
    for (const auto& unit : units_) sizes.push_back(unit->gathered_elements());
    UseTrace& made = trace();
    made.events = recorded_;
    made.plan = plan_residency(made.events, sizes, limits_);
    made.order = gather_order(made.events, made.plan, sizes);
    made.complete = true;
  }
  forget_reads();
  put_off_.clear();
  mode_ = Mode::none;
  following_ = false;
}

const ResidencyStep* Residency::advance(const UseEvent& event) {
  if (mode_ == Mode::none || mode_ == Mode::list) return nullptr;
  recorded_.push_back(event);
  if (!following_) return nullptr;
  UseTrace& known = trace();
  if (position_ < known.events.size() && known.events[position_] == event) return &known.plan[position_++];
  following_ =
      false;  // the model took another path: what was prefetched is dropped at its release or at the end
  known.complete = false;
  ++stats_.trace_breaks;
  return nullptr;
}

void Residency::gather(Unit& unit, bool ahead, bool exact) {
  const std::int64_t elements = unit.gathered_elements();
  // Gathers under way may hold every buffer; all ranks started the same ones, so they end without our help.
  for (const GroupMemory& memory : memories_)
    if (memory.reader && !memory.reader->can_take(unit))
      for (const auto& other : units_) other->settle();
  unit.start_gather(memories_, ahead, exact);
  if (elements == 0) return;
  ++stats_.gathers;
  if (ahead) ++stats_.prefetched;
  stats_.live += elements;
  stats_.peak_live = std::max(stats_.peak_live, stats_.live);
}

void Residency::drop(Unit& unit) {
  stats_.live -= unit.gathered_elements();
  unit.drop();
}

void Residency::acquired(Unit& unit, bool exact) {
  exact_ = exact;
  if (unit.outdated_ && finish_changes_) finish_changes_();
  const ResidencyStep* step = unit.on_demand() ? nullptr : advance({unit.index(), true});
  if (step) {
    for (const int victim : step->evict) {
      drop(*units_[static_cast<std::size_t>(victim)]);
      ++stats_.evicted;
    }
  }
  if (exact && !unit.exact_ && unit.presence_ != Unit::Presence::absent) drop(unit);
  if (unit.presence_ == Unit::Presence::absent)
    gather(unit, false, exact);
  else if (unit.presence_ == Unit::Presence::resident && unit.gathered_elements() > 0)
    ++stats_.reused;
  if (unit.presence_ == Unit::Presence::under_way) {
    unit.finish_gather();
    for (GroupMemory& memory : memories_)  // into the buffers that it has left
      if (memory.reader) memory.reader->read_ahead();
  }
  if (unit.on_demand()) gather_announced(unit);
  if (!step) return;
  for (const int next : step->prefetch) {
    Unit& coming = *units_[static_cast<std::size_t>(next)];
    if (coming.outdated_)
      put_off_.push_back(&coming);
    else if (coming.presence_ == Unit::Presence::absent)
      gather(coming, true, exact);
  }
}

void Residency::released(Unit& unit) {
  if (unit.on_demand()) return unit.stays_ ? void() : drop(unit);
  const ResidencyStep* step = advance({unit.index(), false});
  if (!step || step->release || unit.gathered_elements() == 0) drop(unit);
}

}  // namespace sherd::sharding

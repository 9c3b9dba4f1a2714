#include "sharding/unit.h"

#include <algorithm>

namespace sherd::sharding {

bool Unit::trainable() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const auto& s) { return s->key().trainable; });
}

std::int64_t Unit::gathered_elements() const {
  std::int64_t total = 0;
  for (const auto& segment : segments_)
    if (segment->parameters_sharded()) total += segment->layout().padded();
  return total;
}

std::vector<const Segment*> Unit::stored_segments(const comm::Communicator& group) const {
  std::vector<const Segment*> stored;
  for (const auto& segment : segments_)
    if (segment->groups().shard == &group && segment->parameters().stored()) stored.push_back(segment.get());
  return stored;
}

void Unit::hold() {
  if (leases_ == 0) residency_.acquired(*this);
  ++leases_;
}

void Unit::let_go() {
  if (--leases_ == 0) residency_.released(*this);
}

void Unit::start_gather(std::deque<GroupMemory>& memories, bool async) {
  gathered_.assign(segments_.size(), nullptr);
  for (GroupMemory& memory : memories) {
    Gathering gathering;
    if (memory.reader) gathering.staged = memory.reader->take(*this);
    std::vector<comm::GatherPiece> pieces;
    std::size_t next = 0;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      const Segment& segment = *segments_[i];
      if (!segment.parameters_sharded() || segment.groups().shard != &memory.group) continue;
      const StateBuffer& own = segment.parameters();
      gathered_[i] = memory.pool.take(segment.layout().padded(), own.dtype());
      pieces.push_back({own.stored() ? gathering.staged.shards[next++] : own.tensor(), *gathered_[i]});
    }
    if (pieces.empty()) continue;
    comm::CallOptions options;
    options.label = name_ + " parameters";
    options.async = async;
    gathering.work = memory.group.all_gather(std::move(pieces), options);
    gathering_.push_back(std::move(gathering));
  }
  state_ = State::under_way;
}

void Unit::settle() {
  for (Gathering& gathering : gathering_) gathering.work.wait();
  gathering_.clear();
}

void Unit::finish_gather() {
  settle();
  for (std::size_t i = 0; i < segments_.size(); ++i)
    segments_[i]->attach_values(gathered_[i] ? *gathered_[i] : segments_[i]->parameters().tensor());
  state_ = State::resident;
}

void Unit::drop() {
  settle();
  for (const auto& segment : segments_) segment->detach_values();
  gathered_.clear();
  state_ = State::absent;
}

Unit& Residency::add_unit(std::string name) {
  units_.push_back(std::make_unique<Unit>(static_cast<int>(units_.size()), std::move(name), *this));
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
  for (GroupMemory& memory : memories_)
    if (memory.reader) memory.reader->forget();
}

void Residency::abandon() {
  for (const auto& unit : units_)
    if (unit->leases_ == 0 && unit->state_ != Unit::State::absent) drop(*unit);
  forget_reads();
  pass_ = Pass::none;
  following_ = false;
}

void Residency::begin(Pass pass) {
  abandon();
  pass_ = pass;
  position_ = 0;
  recorded_.clear();
  following_ = trace().complete;
  if (!following_) return;
  for (GroupMemory& memory : memories_)
    if (memory.reader) memory.reader->expect(trace().order);
}

void Residency::end() {
  if (following_ && position_ != trace().events.size()) {
    following_ = false;
    trace().complete = false;
    ++stats_.trace_breaks;
  }
  for (const auto& unit : units_)
    if (unit->leases_ == 0 && unit->state_ != Unit::State::absent) drop(*unit);
  if (!following_) {
    std::vector<std::int64_t> sizes;
    for (const auto& unit : units_) sizes.push_back(unit->gathered_elements());
    Trace& made = trace();
    made.events = recorded_;
    made.plan = plan_residency(made.events, sizes, limits_);
    made.order = gather_order(made.events, made.plan, sizes);
    made.complete = true;
  }
  forget_reads();
  pass_ = Pass::none;
  following_ = false;
}

const ResidencyStep* Residency::advance(const UseEvent& event) {
  if (pass_ == Pass::none) return nullptr;
  recorded_.push_back(event);
  if (!following_) return nullptr;
  Trace& known = trace();
  if (position_ < known.events.size() && known.events[position_] == event) return &known.plan[position_++];
  following_ =
      false;  // the model took another path: what was prefetched is dropped at its release or at the end
  known.complete = false;
  ++stats_.trace_breaks;
  return nullptr;
}

void Residency::gather(Unit& unit, bool ahead) {
  const std::int64_t elements = unit.gathered_elements();
  // Gathers under way may hold every buffer; all ranks started the same ones, so they end without our help.
  for (const GroupMemory& memory : memories_)
    if (memory.reader && !memory.reader->can_take(unit))
      for (const auto& other : units_) other->settle();
  unit.start_gather(memories_, ahead);
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

void Residency::acquired(Unit& unit) {
  const ResidencyStep* step = advance({unit.index(), true});
  if (step) {
    for (const int victim : step->evict) {
      drop(*units_[static_cast<std::size_t>(victim)]);
      ++stats_.evicted;
    }
  }
  if (unit.state_ == Unit::State::absent)
    gather(unit, false);
  else if (unit.state_ == Unit::State::resident && unit.gathered_elements() > 0)
    ++stats_.reused;
  if (unit.state_ == Unit::State::under_way) unit.finish_gather();
  if (!step) return;
  for (const int next : step->prefetch) {
    Unit& coming = *units_[static_cast<std::size_t>(next)];
    if (coming.state_ == Unit::State::absent) gather(coming, true);
  }
}

void Residency::released(Unit& unit) {
  const ResidencyStep* step = advance({unit.index(), false});
  if (!step || step->release || unit.gathered_elements() == 0) drop(unit);
}

}  // namespace sherd::sharding

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

std::vector<const Segment*> Unit::stored_segments() const {
  std::vector<const Segment*> stored;
  for (const auto& segment : segments_)
    if (segment->parameters().stored()) stored.push_back(segment.get());
  return stored;
}

void Unit::hold() {
  if (leases_ == 0) residency_.acquired(*this);
  ++leases_;
}

void Unit::let_go() {
  if (--leases_ == 0) residency_.released(*this);
}

void Unit::start_gather(ExchangePool& pool, comm::Communicator& group, ParameterReader::Staged staged, bool async) {
  std::vector<comm::GatherPiece> pieces;
  std::vector<std::shared_ptr<const Tensor>> gathered;
  std::size_t next = 0;
  for (const auto& segment : segments_) {
    if (!segment->parameters_sharded()) continue;
    gathered.push_back(pool.take(segment->layout().padded(), segment->parameters().dtype()));
    pieces.push_back({segment->parameters().stored() ? staged.shards[next++] : segment->parameters().tensor(),
                      *gathered.back()});
  }
  if (!pieces.empty()) {
    comm::CallOptions options;
    options.label = name_ + " parameters";
    options.async = async;
    gather_work_ = group.all_gather(std::move(pieces), options);
  }
  gathered_ = std::move(gathered);
  staged_ = std::move(staged);
  state_ = State::under_way;
}

void Unit::settle() {
  gather_work_.wait();
  gather_work_ = {};
  staged_ = {};
}

void Unit::finish_gather() {
  settle();
  std::size_t next = 0;
  for (const auto& segment : segments_)
    segment->attach_values(segment->parameters_sharded() ? *gathered_[next++] : segment->parameters().tensor());
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

void Residency::make_reader(offload::Store* store, int buffers, std::int64_t elements) {
  reader_ = std::make_unique<ParameterReader>(group_, device_, store, units_, buffers, elements);
  if (reader_->idle()) reader_.reset();
}

void Residency::abandon() {
  for (const auto& unit : units_)
    if (unit->leases_ == 0 && unit->state_ != Unit::State::absent) drop(*unit);
  if (reader_) reader_->forget();
  pass_ = Pass::none;
  following_ = false;
}

void Residency::begin(Pass pass) {
  abandon();
  pass_ = pass;
  position_ = 0;
  recorded_.clear();
  following_ = trace().complete;
  if (reader_ && following_) reader_->expect(trace().order);
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
  if (reader_) reader_->forget();
  pass_ = Pass::none;
  following_ = false;
}

const ResidencyStep* Residency::advance(const UseEvent& event) {
  if (pass_ == Pass::none) return nullptr;
  recorded_.push_back(event);
  if (!following_) return nullptr;
  Trace& known = trace();
  if (position_ < known.events.size() && known.events[position_] == event) return &known.plan[position_++];
  following_ = false;  // the model took another path: what was prefetched is dropped at its release or at the end
  known.complete = false;
  ++stats_.trace_breaks;
  return nullptr;
}

void Residency::gather(Unit& unit, bool ahead) {
  const std::int64_t elements = unit.gathered_elements();
  ParameterReader::Staged staged;
  if (reader_) {
    // Gathers under way may hold every buffer; all ranks started the same ones, so they end without our help.
    if (!reader_->can_take(unit))
      for (const auto& other : units_) other->settle();
    staged = reader_->take(unit);
  }
  unit.start_gather(pool_, group_, std::move(staged), ahead);
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
  if (unit.state_ == Unit::State::absent) gather(unit, false);
  else if (unit.state_ == Unit::State::resident && unit.gathered_elements() > 0) ++stats_.reused;
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

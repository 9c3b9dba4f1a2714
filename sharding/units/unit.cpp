#include "sharding/units/unit.h"

#include <algorithm>

#include "sharding/units/residency.h"

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

void Unit::end_lease() {
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
      gathered_[i] = memory.pool.take(segment.stored(segment.layout().padded()), own.dtype());
      pieces.push_back({own.stored() ? gathering.staged.shards[next++] : own.tensor(), *gathered_[i]});
    }
    if (pieces.empty()) continue;
    gathering.work =
        memory.group.all_gather(std::move(pieces), {.label = name_ + " parameters", .async = async});
    gathering_.push_back(std::move(gathering));
  }
  presence_ = Presence::under_way;
}

void Unit::settle() {
  for (Gathering& gathering : gathering_) gathering.work.wait();
  gathering_.clear();
}

void Unit::finish_gather() {
  settle();
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = *segments_[i];
    if (segment.key().int8) {
      ExchangePool& pool = residency_.pool(*segment.groups().shard);
      const auto full = pool.take(segment.layout().padded(), segment.compute_dtype());
      segment.dequantize(gathered_[i] ? *gathered_[i] : segment.parameters().tensor(), *full);
      gathered_[i] = full;
    }
    segments_[i]->attach_values(gathered_[i] ? *gathered_[i] : segment.parameters().tensor());
  }
  presence_ = Presence::resident;
}

void Unit::drop() {
  settle();
  for (const auto& segment : segments_) segment->detach_values();
  gathered_.clear();
  presence_ = Presence::absent;
}

}  // namespace sherd::sharding

#include "sharding/units/unit.h"

#include <algorithm>

#include "sharding/units/residency.h"

namespace sherd::sharding {

bool Unit::trainable() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const auto& s) { return s->key().trainable; });
}

bool Unit::has_pruned() const {
  return std::any_of(segments_.begin(), segments_.end(),
                     [](const auto& s) { return s->key().trainable && s->has_pruned(); });
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

void Unit::hold(bool exact) {
  require(
      !exact || exact_ || leases_ == 0 || fp8_.empty(), "the weights of '", name_,
      "' are in use as they were gathered in FP8: ask for exact ones outside of passes, or set fp8.gather to "
      "false");
  if (leases_ == 0) residency_.acquired(*this, exact);
  ++leases_;
}

void Unit::end_lease() {
  if (--leases_ == 0) residency_.released(*this);
}

Tensor Unit::on_device(const Segment& segment, const Tensor& shard) const {
  device::Device& device = segment.device();
  if (!device.has_own_memory() || segment.parameters().tier() == device::Tier::device) return shard;
  Tensor here = Tensor::empty(device, shard.shape(), shard.dtype(), device::Category::communication);
  segment.kernels().copy(shard, here);
  return here;
}

void Unit::start_gather(std::deque<GroupMemory>& memories, bool async, bool exact) {
  gathered_.assign(segments_.size(), nullptr);
  const auto is_fp8 = [](const auto& segment) { return segment->key().fp8; };
  if (fp8_.empty() && std::any_of(segments_.begin(), segments_.end(), is_fp8))
    for (const auto& segment : segments_)
      fp8_.push_back(segment->key().fp8 ? std::make_unique<Fp8Weights>(*segment) : nullptr);
  exact_ = exact || fp8_.empty();
  for (GroupMemory& memory : memories) {
    Gathering gathering;
    if (memory.reader) gathering.staged = memory.reader->take(*this);
    std::vector<comm::GatherPiece> pieces;
    std::size_t next = 0;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      const Segment& segment = *segments_[i];
      if (!segment.parameters_sharded() || segment.groups().shard != &memory.group) continue;
      const StateBuffer& own = segment.parameters();
      Tensor shard = own.stored() ? gathering.staged.shards[next++] : own.tensor();
      if (in_fp8(i)) {
        const auto codes =
            gathering.codes.emplace_back(memory.pool.take(segment.layout().shard(), DType::u8));
        fp8_[i]->encode(on_device(segment, shard), *codes);
        // Codes may travel while a GPU still copies what they are made of.
        if (own.stored() && segment.device().has_own_memory()) gathering.copied = segment.device().record();
        shard = *codes;
      }
      gathered_[i] = memory.pool.take(segment.stored(segment.layout().padded()), shard.dtype());
      pieces.push_back({shard, *gathered_[i]});
    }
    if (pieces.empty()) continue;
    gathering.work =
        memory.group.all_gather(std::move(pieces), {.label = name_ + " parameters", .async = async});
    gathering_.push_back(std::move(gathering));
  }
  presence_ = Presence::under_way;
}

void Unit::settle() {
  for (Gathering& gathering : gathering_) {
    gathering.work.wait();
    if (gathering.copied)
      gathering.copied.wait(segments_.front()->device().deadline(), "parameters on their way to the device");
  }
  gathering_.clear();
}

void Unit::finish_gather() {
  settle();
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = *segments_[i];
    if (in_fp8(i)) {
      ExchangePool& pool = residency_.pool(*segment.groups().shard);
      const auto full = pool.take(segment.layout().padded(), segment.compute_dtype());
      fp8_[i]->decode(*gathered_[i], *full);
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

void Unit::forget_scales(bool trained) {
  for (std::size_t i = 0; i < fp8_.size(); ++i)
    if (fp8_[i] && (!trained || segments_[i]->key().trainable)) fp8_[i]->forget();
}

}  // namespace sherd::sharding

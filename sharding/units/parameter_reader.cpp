#include "sharding/units/parameter_reader.h"

#include <algorithm>
#include <cstring>

#include "device/trace_range.h"
#include "sharding/units/unit.h"

namespace sherd::sharding {
namespace {

constexpr std::size_t page = 4096;

/// Shards begin on pages, as their spans do.
std::size_t room_for(const Segment& segment) {
  const std::size_t bytes = static_cast<std::size_t>(segment.stored(segment.layout().shard())) *
                            size_of(segment.parameters().dtype());
  return (bytes + page - 1) / page * page;
}

/// Bytes up to the first page boundary; none on a device without memory.
std::size_t to_page(const device::Storage& storage) {
  return (page - reinterpret_cast<std::uintptr_t>(storage.data()) % page) % page;
}

}  // namespace

ParameterReader::ParameterReader(comm::Communicator& group, device::Device& device, offload::Store* store,
                                 const std::vector<std::unique_ptr<Unit>>& units, int buffers,
                                 std::int64_t buffer_elements)
    : group_(group), units_(units), buffers_(std::make_shared<HostBuffers>()) {
  std::size_t bytes = 0;
  int stored = 0;
  bool any_on_demand = false;
  for (const auto& unit : units) {
    std::size_t unit_bytes = 0;
    std::int64_t elements = 0;
    for (const Segment* segment : unit->stored_segments(group_))
      unit_bytes += room_for(*segment), elements += segment->layout().shard();
    if (elements > buffer_elements)
      fail(ErrorKind::config, "zero_optimization.offload_param.buffer_size is ", buffer_elements,
           " elements, but this rank's part of '", unit->name(), "' has ", elements,
           ": set it to at least that");
    bytes = std::max(bytes, unit_bytes);
    stored += unit_bytes > 0;
    any_on_demand |= unit->on_demand() && unit_bytes > 0;
  }
  if (bytes == 0) return;
  if (any_on_demand) reserved_ = static_cast<std::size_t>(std::clamp(buffers - 1, 0, 2));
  for (int i = 0; i < std::min(buffers, stored); ++i) {
    device::Storage storage =
        group.allocate(device, bytes + page, device::Category::communication, device::Tier::host);
    buffers_->loans.push_back(store->lend(storage));
    const std::size_t begin = to_page(storage);
    buffers_->all.push_back(
        Tensor::view_of(std::move(storage), begin, {static_cast<std::int64_t>(bytes)}, DType::u8));
    buffers_->free.push_back(static_cast<std::size_t>(i));
  }
}

ParameterReader::~ParameterReader() {
  forget();
}

void ParameterReader::expect(const std::vector<int>& units) {
  forget();
  for (const int unit : units)
    if (!units_[static_cast<std::size_t>(unit)]->stored_segments(group_).empty()) expected_.push_back(unit);
  read_ahead();
}

void ParameterReader::announce(const Unit& unit) {
  const auto is_this = [&](const PendingRead& r) { return r.unit == unit.index(); };
  if (unit.stored_segments(group_).empty() || std::any_of(ahead_.begin(), ahead_.end(), is_this) ||
      std::find(announced_.begin(), announced_.end(), unit.index()) != announced_.end())
    return;
  announced_.push_back(unit.index());
  read_ahead();
}

void ParameterReader::forget() {
  expected_.clear();
  announced_.clear();
  ahead_.clear();
}

bool ParameterReader::can_take(const Unit& unit) const {
  return !buffers_->free.empty() || !ahead_.empty() || unit.stored_segments(group_).empty();
}

ParameterReader::Staged ParameterReader::take(const Unit& unit) {
  if (unit.stored_segments(group_).empty()) return {};
  read_ahead();
  const auto is_next = [&](const PendingRead& r) {
    return unit.on_demand() ? r.unit == unit.index() : !on_demand(r.unit);
  };
  auto at = std::find_if(ahead_.begin(), ahead_.end(), is_next);
  if (at == ahead_.end() || at->unit != unit.index()) {
    if (unit.on_demand()) {
      std::erase(announced_, unit.index());
    } else if (at == ahead_.end() && !expected_.empty() && expected_.front() == unit.index()) {
      expected_.pop_front();  // units on demand had its buffer
    } else {                  // the order has been left
      expected_.clear();
      std::erase_if(ahead_, [&](const PendingRead& r) { return !on_demand(r.unit); });
    }
    make_room();
    ahead_.push_front(start(unit));
    at = ahead_.begin();
  }
  PendingRead reading = std::move(*at);
  ahead_.erase(at);
  require(reading.awaited == 0, "parameters of '", unit.name(), "' are read before they have changed");
  {
    const device::TraceRange range("read from NVMe", unit.name());
    for (offload::Io& io : reading.ios) io.wait();
  }
  read_ahead();
  return std::move(reading.staged);
}

bool ParameterReader::on_demand(int unit) const {
  return units_[static_cast<std::size_t>(unit)]->on_demand();
}

/// The unit that was read last goes, and is read again in its turn.
void ParameterReader::make_room() {
  while (buffers_->free.empty() && !ahead_.empty()) {
    const int unit = ahead_.back().unit;
    ahead_.pop_back();
    (on_demand(unit) ? announced_ : expected_).push_front(unit);
  }
}

ParameterReader::PendingRead ParameterReader::start(const Unit& unit) {
  require(!buffers_->free.empty(), "no buffer is free for the parameters of '", unit.name(), "'");
  const std::size_t index = buffers_->free.back();
  buffers_->free.pop_back();
  PendingRead reading;
  reading.unit = unit.index();
  reading.staged.lease =
      std::shared_ptr<void>(nullptr, [buffers = buffers_, index](void*) { buffers->free.push_back(index); });
  std::size_t at = 0;
  for (const Segment* segment : unit.stored_segments(group_)) {
    const std::int64_t shard = segment->layout().shard();
    const Tensor to = Tensor::view_of(buffers_->all[index].storage(), buffers_->all[index].byte_offset() + at,
                                      {segment->stored(shard)}, segment->parameters().dtype());
    reading.staged.shards.push_back(to);
    if (unit.unchanged() && segment->key().trainable)
      reading.awaited += shard;
    else
      reading.ios.push_back(segment->parameters().read(segment->stored(segment->own_begin()), to));
    at += room_for(*segment);
  }
  return reading;
}

void ParameterReader::read_ahead() {
  while (!announced_.empty() && !buffers_->free.empty()) {
    const Unit& next = *units_[static_cast<std::size_t>(announced_.front())];
    if (!next.changed()) break;
    ahead_.push_back(start(next));
    announced_.pop_front();
  }
  while (!expected_.empty() && buffers_->free.size() > reserved_) {
    const Unit& next = *units_[static_cast<std::size_t>(expected_.front())];
    if (!next.changed() && (!next.unchanged() || awaits(next))) return;  // its change ends first
    ahead_.push_back(start(next));
    expected_.pop_front();
  }
}

bool ParameterReader::awaits(const Unit& unit) const {
  return std::any_of(ahead_.begin(), ahead_.end(), [&](const PendingRead& reading) {
    return reading.unit == unit.index() && reading.awaited > 0;
  });
}

void ParameterReader::hand_over(const Unit& unit, const Segment& segment, std::int64_t begin,
                                const Tensor& from) {
  for (PendingRead& reading : ahead_) {
    if (reading.unit != unit.index() || reading.awaited == 0) continue;
    const std::vector<const Segment*> stored = unit.stored_segments(group_);
    const auto at =
        static_cast<std::size_t>(std::find(stored.begin(), stored.end(), &segment) - stored.begin());
    const std::int64_t first = begin - segment.own_begin();
    const Tensor to = reading.staged.shards[at].range(first, first + from.numel());
    if (to.raw()) std::memcpy(to.raw(), from.raw(), from.bytes());  // none on a device without memory
    reading.awaited -= from.numel();
  }
}

}  // namespace sherd::sharding

#include "sharding/reducer.h"

#include <algorithm>
#include <string>

namespace sherd::sharding {

void Reducer::submit(Segment& segment, std::shared_ptr<const Tensor> full, bool accumulate) {
  if (group_.size() == 1) {  // the one rank's gradients are the sum
    if (full) segment.store_gradients(*full);
    if (landed_) landed_(segment);
    return;
  }
  if (!full) full = std::make_shared<const Tensor>(segment.gradients().tensor());
  queue_.push_back({&segment, std::move(full), accumulate});
  queued_ += segment.layout().padded();
  while (queued_ >= bucket_limit()) send_bucket();
}

void Reducer::finish() {
  while (queued_ > 0) send_bucket();
  land(0);
}

void Reducer::abandon() {
  queue_.clear();
  queued_ = 0;
  land(0, false);
}

std::int64_t Reducer::bucket_limit() const {
  const std::int64_t least = layout_alignment * group_.size();
  if (bucket_elements_ == 0) return queue_.empty() ? least : std::max(least, queue_.front().segment->layout().padded());
  return std::max(least, bucket_elements_);
}

namespace {
/// Names every block of a bucket: ranks that ran different ones must not add up each other's gradients.
std::string gradients_of(const std::vector<std::string>& names) {
  std::string label;
  for (const std::string& name : names) label += (label.empty() ? "" : ", ") + name;
  return label + " gradients";
}
}  // namespace

void Reducer::send_bucket() {
  const std::int64_t limit = bucket_limit();
  const int ranks = group_.size();
  std::vector<comm::ReducePiece> pieces;
  std::vector<comm::GatherPiece> gathers;
  Flight flight, gathering;
  std::vector<std::string> names;
  std::int64_t elements = 0;
  while (!queue_.empty() && elements + layout_alignment * ranks <= limit) {
    Item& item = queue_.front();
    const std::int64_t shard = item.segment->layout().shard();
    const std::int64_t room = (limit - elements) / ranks / layout_alignment * layout_alignment;
    const std::int64_t count = std::min(shard - item.sent, room);
    pieces.push_back({*item.full, item.segment->own_gradients(), item.sent, item.sent + count, {}});
    if (item.accumulate) pieces.back().onto = pieces.back().shard;
    if (names.empty() || names.back() != item.segment->name()) names.push_back(item.segment->name());
    flight.held.push_back(item.full);
    elements += count * ranks;
    item.sent += count;
    if (item.sent < shard) continue;
    const bool replicated = item.segment->optimizer_replicated();
    (replicated ? gathering : flight).complete.push_back(item.segment);
    if (replicated)
      gathers.push_back({item.segment->own_gradients(), item.segment->gradients().tensor()});
    queue_.pop_front();
  }
  queued_ -= elements;
  comm::CallOptions options;
  options.async = overlap_;
  options.label = gradients_of(names);
  flight.work = group_.reduce_scatter(std::move(pieces), rounding_, options);
  ++stats_.buckets;
  stats_.overlapped += overlap_;
  stats_.largest_bucket = std::max(stats_.largest_bucket, elements);
  flights_.push_back(std::move(flight));
  if (!gathers.empty()) {
    gathering.work = group_.all_gather(std::move(gathers), options);
    flights_.push_back(std::move(gathering));
  }
  land(overlap_ ? 2 : 0);
}

void Reducer::land(std::size_t most_under_way, bool tell) {
  while (flights_.size() > most_under_way) {
    flights_.front().work.wait();
    const std::vector<Segment*> complete = std::move(flights_.front().complete);
    flights_.pop_front();
    if (!tell || !landed_) continue;
    for (Segment* segment : complete) landed_(*segment);
  }
}

}  // namespace sherd::sharding

#include "sharding/reducer.h"

#include <algorithm>

namespace sherd::sharding {

Reducer::Reducer(const ParameterGroups& groups, tensor::Kernels& kernels, ExchangePool* replica_pool,
                 const ReducerOptions& options, ReducerStats& stats)
    : groups_(groups), kernels_(kernels), replica_pool_(replica_pool), options_(options), stats_(stats) {
  require(!groups.replica || replica_pool, "replicas need a pool of exchange buffers");
}

void Reducer::submit(Segment& segment, std::shared_ptr<const Tensor> full, bool accumulate) {
  const Tensor own = segment.own_gradients();
  if (groups_.shards() == 1 && !groups_.replica) {  // the one rank's fold
    const Tensor from = full ? *full : own;
    if (full || (options_.rounding != own.dtype() && options_.reduction == comm::Reduction::ordered))
      kernels_.sum_ranks({&from, 1}, 1, options_.rounding, own, accumulate);
    if (complete_) complete_(segment);
    return;
  }
  Item item{&segment, std::move(full), nullptr, accumulate, Agreement::none};
  if (boundary_ && groups_.replica)
    item.agreement = chained() && !accumulate ? Agreement::chain : Agreement::sum;
  const bool in_place = !item.full;
  if (in_place) item.full = std::make_shared<const Tensor>(segment.gradients().tensor());
  // Between replicas sums travel in fp32, in memory of the device, and beside the gradients that are still to
  // be folded.
  if (item.agreement == Agreement::chain &&
      (in_place || own.dtype() != DType::f32 || segment.gradients().tier() != device::Tier::device))
    item.sums = replica_pool_->take(own.numel(), DType::f32);
  push(std::move(item));
}

void Reducer::submit_sum(Segment& segment) {
  if (groups_.replica) push({&segment, nullptr, nullptr, true, Agreement::sum});
}

void Reducer::push(Item item) {
  queued_ += item.segment->layout().padded();
  queue_.push_back(std::move(item));
  while (queued_ >= bucket_limit()) send_bucket();
}

void Reducer::finish() {
  while (queued_ > 0) send_bucket();
  progress(true);
}

void Reducer::abandon() {
  queue_.clear();
  queued_ = 0;
  progress(true, false);
}

std::int64_t Reducer::bucket_limit() const {
  const std::int64_t least = layout_alignment * groups_.shards();
  if (options_.bucket_elements == 0)
    return queue_.empty() ? least : std::max(least, queue_.front().segment->layout().padded());
  return std::max(least, options_.bucket_elements);
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
  const int ranks = groups_.shards();
  Flight flight;
  std::vector<std::string> names;
  std::int64_t elements = 0;
  while (!queue_.empty() && elements + layout_alignment * ranks <= limit) {
    Item& item = queue_.front();
    const std::int64_t shard = item.segment->layout().shard();
    const std::int64_t room = (limit - elements) / ranks / layout_alignment * layout_alignment;
    const std::int64_t count = std::min(shard - item.sent, room);
    flight.parts.push_back({item, item.sent, item.sent + count});
    if (names.empty() || names.back() != item.segment->name()) names.push_back(item.segment->name());
    elements += count * ranks;
    item.sent += count;
    if (item.sent < shard) continue;
    flight.complete.push_back(item.segment);
    queue_.pop_front();
  }
  queued_ -= elements;
  flight.label = gradients_of(names);
  stats_.largest_bucket = std::max(stats_.largest_bucket, elements);
  if (chained() && groups_.replica_index() > 0)
    for (const Part& part : flight.parts)
      if (part.item.agreement == Agreement::chain)
        flight.incoming.push_back(groups_.replica->receive(part.sums(), groups_.replica_index() - 1,
                                                           {.label = flight.label, .async = true}));
  flights_.push_back(std::move(flight));
  progress(false);
}

void Reducer::progress(bool drain, bool tell) {
  // Calls are made at points of the program that are the same on all ranks: a bucket waits one turn for the
  // sums of the replica before it where the thread need not, and as many as there are replicas for the last
  // one's. So replicas may be as many buckets apart as there are of them.
  const std::size_t issue_lag = chained() && options_.overlap ? 1 : 0;
  const std::size_t pass_lag = issue_lag + (options_.overlap ? 1 : 0);
  const std::size_t apart = groups_.replica ? static_cast<std::size_t>(groups_.replicas()) : 0;
  const std::size_t agree_lag = pass_lag + apart;
  const std::size_t kept = apart > 0 ? agree_lag + apart : options_.overlap ? 2 : 0;
  const auto due = [&](std::size_t lag) {
    return drain ? flights_.size() : flights_.size() - std::min(flights_.size(), lag);
  };
  while (issued_ < due(issue_lag) || passed_ < due(pass_lag)) {
    if (issued_ < due(issue_lag)) issue(flights_[issued_++]);
    if (passed_ < std::min(issued_, due(pass_lag))) pass_on(flights_[passed_++]);
  }
  while (agreed_ < due(agree_lag)) agree(flights_[agreed_++]);
  while (flights_.size() > (drain ? 0 : kept)) {
    Flight flight = std::move(flights_.front());
    flights_.pop_front();
    --issued_, --passed_, --agreed_;
    settle(flight, tell);
  }
}

comm::CallOptions Reducer::options_for(const Flight& flight) const {
  comm::CallOptions options;
  options.label = flight.label;
  options.async = options_.overlap;
  options.reduction = options_.reduction;
  return options;
}

/// The fold over the shard group.
void Reducer::issue(Flight& flight) {
  for (comm::Work& work : flight.incoming) work.wait();
  std::vector<comm::ReducePiece> pieces;
  for (const Part& part : flight.parts) {
    if (!part.item.full) continue;
    const bool onto =
        part.item.accumulate || (part.item.agreement == Agreement::chain && groups_.replica_index() > 0);
    pieces.push_back({*part.item.full, part.shard(), part.begin, part.end, onto ? part.shard() : Tensor()});
  }
  if (!pieces.empty()) {
    flight.reduced = groups_.shard->reduce_scatter(std::move(pieces), options_.rounding, options_for(flight));
    ++stats_.buckets;
    stats_.overlapped += options_.overlap;
  }
  if (!groups_.replica || !boundary_) gather_sums(flight);
}

/// The chain: sums that this replica has folded go to the next one.
void Reducer::pass_on(Flight& flight) {
  if (!groups_.replica || !boundary_) return;
  flight.reduced.wait();
  if (groups_.replica_index() + 1 == groups_.replicas()) return;
  for (const Part& part : flight.parts)
    if (part.item.agreement == Agreement::chain)
      flight.outgoing.push_back(groups_.replica->send(part.sums(), groups_.replica_index() + 1,
                                                      {.label = flight.label, .async = true}));
}

/// The last replica's sums go to all; sums that formed apart are added up.
void Reducer::agree(Flight& flight) {
  comm::CallOptions options = options_for(flight);
  options.async = true;
  for (const Part& part : flight.parts) {
    if (part.item.agreement == Agreement::chain)
      flight.agreed.push_back(groups_.replica->broadcast(part.sums(), groups_.replicas() - 1, options));
    if (part.item.agreement == Agreement::sum)
      flight.agreed.push_back(groups_.replica->all_reduce(part.sums(), comm::ReduceOp::sum, 1, options));
  }
}

void Reducer::settle(Flight& flight, bool tell) {
  flight.reduced.wait();
  for (auto* works : {&flight.outgoing, &flight.agreed})
    for (comm::Work& work : *works) work.wait();
  for (const Part& part : flight.parts)
    if (part.item.sums)
      kernels_.copy(part.sums(), part.item.segment->own_gradients().range(part.begin, part.end));
  if (groups_.replica && boundary_) gather_sums(flight);
  flight.gathered.wait();
  if (!tell || !complete_) return;
  for (Segment* segment : flight.complete) complete_(*segment);
}

/// Where every rank updates everything, it needs the whole sum.
void Reducer::gather_sums(Flight& flight) {
  std::vector<comm::GatherPiece> gathers;
  for (const Segment* segment : flight.complete)
    if (segment->optimizer_replicated() && groups_.shards() > 1)
      gathers.push_back({segment->own_gradients(), segment->gradients().tensor()});
  if (!gathers.empty()) flight.gathered = groups_.shard->all_gather(std::move(gathers), options_for(flight));
}

}  // namespace sherd::sharding

#include "sharding/gradients/reducer.h"

#include <algorithm>
#include <utility>

#include "base/text/excerpt.h"

namespace sherd::sharding {

/// Not of the pool, whose users take and give back at the same points on all ranks; replicas keep a bucket
/// for different times.
Tensor Reducer::sums_of(const Segment& segment) const {
  return Tensor::empty(kernels_.device(), {segment.layout().shard()}, DType::f32,
                       device::Category::communication);
}

void Reducer::submit(Segment& segment, std::shared_ptr<const Tensor> full, bool accumulate, bool last,
                     std::span<const Segment::Range> apart) {
  const Tensor own = segment.own_gradients();
  const int shards = segment.groups().shards();
  const bool summed = !full && shards == 1 && options_.reduction == Reduction::native;
  if (summed && groups_.replica) return last ? submit_sum(segment) : void();  // where backward has written
  if (segment.gradient_groups().alone()) {                                    // the one rank's fold
    const Tensor from = full ? *full : own;
    const std::int64_t padded = segment.layout().padded();
    if (full || (options_.rounding != own.dtype() && !summed))
      for (std::int64_t at = 0; at < from.numel(); at += padded)
        for (const auto& [begin, end] : apart)
          kernels_.fold(from.range(at + begin, at + end), options_.rounding, own.range(begin, end),
                        accumulate || at > 0);
    if (last) complete_.push_back(&segment);
    return;
  }
  Item item{&segment, std::move(full), {}, accumulate, last, Agreement::none};
  if (last && groups_.replica) item.agreement = chained() && !accumulate ? Agreement::fold : Agreement::add;
  const bool in_place = !item.full;
  if (in_place) item.full = std::make_shared<const Tensor>(segment.gradients().tensor());
  // Between replicas sums travel in fp32, in memory of the device, and beside gradients that are still to be
  // folded.
  if (item.agreement == Agreement::fold &&
      (in_place || own.dtype() != DType::f32 || segment.gradients().tier() != device::Tier::device))
    item.sums = sums_of(segment);
  push(std::move(item));
}

void Reducer::submit_sum(Segment& segment) {
  if (groups_.replica) push({&segment, nullptr, {}, true, true, Agreement::add});
}

void Reducer::push(Item item) {
  if (item.agreement == Agreement::add && chained()) item.sums = sums_of(*item.segment);
  Queue& queue = queue_of(*item.segment);
  if (!queue.items.empty() && queue.items.back().last != item.last) send_buckets(queue);  // one kind to each
  queue.elements += item.segment->layout().padded() * item.segment->sources();
  queue.items.push_back(std::move(item));
  while (queue.elements >= bucket_limit(queue)) send_bucket(queue);
}

Reducer::Queue& Reducer::queue_of(const Segment& segment) {
  for (Queue& queue : queues_)
    if (&queue.shard == segment.groups().shard) return queue;
  return queues_.emplace_back(*segment.groups().shard);
}

void Reducer::send_buckets(Queue& queue) {
  while (!queue.items.empty()) send_bucket(queue);
}

void Reducer::settle() {
  for (Queue& queue : queues_) send_buckets(queue);
  if (!groups_.replica ||
      std::none_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.last; }))
    drain();
}

void Reducer::finish() {
  for (Queue& queue : queues_) send_buckets(queue);
  if (chained()) send_end();
  drain();
  if (chained() && options_.compare_replicas) compare_replicas();
}

void Reducer::compare_replicas() {
  const Tensor nothing = Tensor::zeros(kernels_.device(), {1}, DType::f32, device::Category::communication);
  groups_.replica
      ->all_reduce(nothing, comm::ReduceOp::sum, 1,
                   {.label = "gradients of replicas" + agreed_on_, .scalar = true})
      .wait();
}

void Reducer::abandon() {
  for (Queue& queue : queues_) queue.items.clear(), queue.elements = 0;
  if (failed_) {
    settled_ += buckets_.size();
    buckets_.clear();
    turns_.drain();
    failed_ = false;
  }
  drain();
  summed_.clear();
}

std::int64_t Reducer::bucket_limit(const Queue& queue) const {
  const Segment* front = queue.items.empty() ? nullptr : queue.items.front().segment;
  const std::int64_t least = layout_alignment * queue.shard.size() * (front ? front->sources() : 1);
  if (options_.bucket_elements == 0)
    return front ? std::max(least, front->layout().padded() * front->sources()) : least;
  return std::max(least, options_.bucket_elements);
}

void Reducer::send_bucket(Queue& queue) {
  const std::int64_t limit = bucket_limit(queue);
  const int ranks = queue.shard.size();
  Bucket bucket;
  bucket.last = queue.items.front().last;
  bucket.shard = &queue.shard;
  std::vector<std::string> names;
  std::int64_t elements = 0;
  while (!queue.items.empty()) {
    Item& item = queue.items.front();
    const std::int64_t shard = item.segment->layout().shard(), given = ranks * item.segment->sources();
    const std::int64_t room = (limit - elements) / given / layout_alignment * layout_alignment;
    if (room == 0) break;
    const std::int64_t count = std::min(shard - item.sent, room);
    bucket.parts.push_back({item, item.sent, item.sent + count});
    if (names.empty() || names.back() != item.segment->name()) names.push_back(item.segment->name());
    elements += count * given;
    item.sent += count;
    if (item.sent < shard) continue;
    bucket.complete.push_back(item.segment);
    queue.items.pop_front();
  }
  queue.elements -= elements;
  // It names every block: ranks that ran different ones must not add up each other's gradients.
  bucket.label = joined_text(names) + " gradients";
  stats_.largest_bucket = std::max(stats_.largest_bucket, elements);
  if (bucket.last && groups_.replica) agreed_on_ += "; " + bucket.label;
  launch(std::move(bucket));
}

/// Behind a replica's last bucket goes a transfer of a size that no part of a bucket has: replicas that
/// reduce different numbers of buckets find that their calls do not match, instead of waiting for what never
/// comes.
void Reducer::send_end() {
  Bucket bucket;
  bucket.end = Tensor::zeros(kernels_.device(), {1}, DType::f32, device::Category::communication);
  bucket.label = "the end of the gradients";
  launch(std::move(bucket));
}

void Reducer::launch(Bucket bucket) {
  if (bucket.last && chained() && !first())
    transfer(Direction::receive, groups_.replica_index() - 1, bucket, bucket.incoming);
  buckets_.push_back(std::move(bucket));
  take(turns_.launch());
  if (!groups_.replica) tell_complete();  // replicas are some buckets apart until all have come
}

void Reducer::drain() {
  take(turns_.drain());
  tell_complete();
}

void Reducer::tell_complete() {
  complete_.insert(complete_.end(), summed_.begin(), summed_.end());
  summed_.clear();
}

void Reducer::take(const std::vector<Turn>& turns) {
  try {
    for (const Turn& turn : turns) take(turn);
  } catch (...) {
    failed_ = true;
    throw;
  }
}

void Reducer::take(const Turn& turn) {
  Bucket& bucket = buckets_[turn.bucket - settled_];
  switch (turn.op) {
    case Turn::Op::issue:
      return issue(bucket);
    case Turn::Op::pass_on:
      return pass_on(bucket);
    case Turn::Op::pass_back:
      return pass_back(bucket);
    case Turn::Op::settle:
      settle(bucket);
      buckets_.pop_front();
      ++settled_;
  }
}

comm::CallOptions Reducer::options_for(const Bucket& bucket) const {
  return {.label = bucket.label, .reduction = options_.reduction, .async = options_.overlap};
}

/// The fold over the shard group.
void Reducer::issue(Bucket& bucket) {
  for (comm::Work& work : bucket.incoming) work.wait();
  std::vector<comm::ReducePiece> pieces;
  for (const BucketPart& part : bucket.parts) {
    if (!part.item.full) continue;
    const bool chain = part.item.agreement == Agreement::fold;
    const Tensor shard = chain ? part.shard() : part.item.segment->own_gradients();
    const bool onto = part.item.accumulate || (chain && !first());
    if (part.item.segment->sources() > 1) {
      bucket.by_source.push_back(send_sources(part, shard, onto, bucket));
      continue;
    }
    pieces.push_back({*part.item.full, shard, part.begin, part.end, onto ? shard : Tensor()});
  }
  if (!pieces.empty()) {
    bucket.reduced = bucket.shard->reduce_scatter(std::move(pieces), options_.rounding, options_for(bucket));
    ++stats_.buckets;
    stats_.overlapped += options_.overlap;
  }
  if (!groups_.replica) gather_sums(bucket);
}

/// Each rank sends its gradients of several sources to the owners, who fold them in order.
Reducer::BySource Reducer::send_sources(const BucketPart& part, const Tensor& shard, bool onto,
                                        const Bucket& bucket) {
  const SegmentLayout& layout = part.item.segment->layout();
  const std::int64_t ranks = layout.ranks(), sources = part.item.segment->sources(),
                     n = part.end - part.begin;
  const auto room = [&] {
    return Tensor::empty(kernels_.device(), {ranks * sources * n}, options_.rounding,
                         device::Category::communication);
  };
  BySource out{room(), room(), shard.range(part.begin, part.end), onto, {}};
  for (std::int64_t i = 0; i < ranks * sources; ++i) {
    const std::int64_t from = i % sources * layout.padded() + i / sources * layout.shard() + part.begin;
    kernels_.copy(part.item.full->range(from, from + n), out.sent.range(i * n, (i + 1) * n));
  }
  out.work = bucket.shard->all_to_all(out.sent, out.received, {}, {}, options_for(bucket));
  return out;
}

/// The fold over the shard group has ended.
void Reducer::finish_sums(Bucket& bucket) {
  bucket.reduced.wait();
  for (BySource& part : std::exchange(bucket.by_source, {})) {
    part.work.wait();
    const std::int64_t n = part.sums.numel();
    Tensor sums = part.sums;
    if (sums.dtype() != DType::f32) {  // which rounds once
      sums = Tensor::empty(kernels_.device(), {n}, DType::f32, device::Category::communication);
      if (part.onto) kernels_.copy(part.sums, sums);
    }
    for (std::int64_t at = 0; at < part.received.numel(); at += n)
      kernels_.fold(part.received.range(at, at + n), options_.rounding, sums, part.onto || at > 0);
    if (sums.dtype() != part.sums.dtype()) kernels_.copy(sums, part.sums);
  }
}

void Reducer::transfer(Direction direction, int replica, const Bucket& bucket,
                       std::vector<comm::Work>& works) {
  const comm::CallOptions options{.label = bucket.label, .async = true};
  const auto add = [&](const Tensor& sums) {
    works.push_back(direction == Direction::send ? groups_.replica->send(sums, replica, options)
                                                 : groups_.replica->receive(sums, replica, options));
  };
  for (const BucketPart& part : bucket.parts) add(part.sums());
  if (bucket.end.defined()) add(bucket.end);
}

/// This replica's sums go to the next one.
void Reducer::pass_on(Bucket& bucket) {
  if (!groups_.replica) return;
  finish_sums(bucket);
  for (BucketPart& part : bucket.parts) part.item.full.reset();  // read; results may be long in coming
  if (!bucket.last) return;
  if (!chained()) {
    for (const BucketPart& part : bucket.parts)
      bucket.results.push_back(
          groups_.replica->all_reduce(part.sums(), comm::ReduceOp::sum, 1, options_for(bucket)));
    return;
  }
  for (const BucketPart& part : bucket.parts) {
    if (part.item.agreement != Agreement::add) continue;
    const Tensor own = part.item.segment->own_gradients().range(part.begin, part.end);
    kernels_.fold(own, own.dtype(), part.sums(), !first());
  }
  if (last()) return;
  transfer(Direction::send, groups_.replica_index() + 1, bucket, bucket.outgoing);
  transfer(Direction::receive, groups_.replica_index() + 1, bucket, bucket.results);
}

/// The last replica's sums come back.
void Reducer::pass_back(Bucket& bucket) {
  for (comm::Work& work : bucket.results) work.wait();
  if (bucket.last && chained() && !first())
    transfer(Direction::send, groups_.replica_index() - 1, bucket, bucket.outgoing);
}

void Reducer::settle(Bucket& bucket) {
  finish_sums(bucket);
  for (comm::Work& work : bucket.outgoing) work.wait();
  for (const BucketPart& part : bucket.parts)
    if (part.item.sums.defined())
      kernels_.copy(part.sums(), part.item.segment->own_gradients().range(part.begin, part.end));
  if (groups_.replica && bucket.last) gather_sums(bucket);
  bucket.gathered.wait();
  if (bucket.last) summed_.insert(summed_.end(), bucket.complete.begin(), bucket.complete.end());
}

/// Where every rank updates everything, it needs the whole sum.
void Reducer::gather_sums(Bucket& bucket) {
  std::vector<comm::GatherPiece> gathers;
  for (const Segment* segment : bucket.complete)
    if (segment->optimizer_replicated() && bucket.shard->size() > 1)
      gathers.push_back({segment->own_gradients(), segment->gradients().tensor()});
  if (!gathers.empty()) bucket.gathered = bucket.shard->all_gather(std::move(gathers), options_for(bucket));
}

}  // namespace sherd::sharding

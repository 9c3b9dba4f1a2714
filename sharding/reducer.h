#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/segment.h"

namespace sherd::sharding {

/// Counts for tests and reports.
struct ReducerStats {
  std::int64_t buckets = 0;         ///< reduce-scatters issued
  std::int64_t largest_bucket = 0;  ///< elements of the largest one, over all ranks' parts
  std::int64_t overlapped = 0;      ///< of them, issued on the communicator's own thread
};

/// How gradients are reduced.
struct ReducerOptions {
  DType rounding = DType::f32;  ///< each rank's contribution travels as this (communication_data_type)
  std::int64_t bucket_elements =
      500'000'000;       ///< bound of one reduce-scatter; 0 sends each segment by itself
  bool overlap = false;  ///< on the communicator's thread, at most two at a time
  comm::Reduction reduction = comm::Reduction::ordered;
};

/// Sends finished gradients off in buckets while backward goes on: folds each segment onto its shard of the
/// sum, exchanges sums between replicas at the boundary, and gathers the sum again where every rank updates
/// everything.
///
/// Ordered, every element is a fold over ranks in rank order, so no bucket size changes a bit. Replicas form
/// a chain: each folds its ranks' gradients onto the sums of the replica before it, and the last one's sums
/// go to all; which is the fold over all ranks. Where micro-batches were summed before the boundary, replicas
/// add their own sums in replica order.
///
/// Of the segments of one ParameterGroups. Used from the rank's thread; all ranks submit the same segments in
/// the same order.
class Reducer {
 public:
  /// `replica_pool`: exchange buffers between replicas; null without them. `stats` are counted up.
  Reducer(const ParameterGroups& groups, tensor::Kernels& kernels, ExchangePool* replica_pool,
          const ReducerOptions& options, ReducerStats& stats);

  /// `complete` is told of each segment whose submitted gradients have arrived, from submit() or finish(): at
  /// the same points of the program on all ranks.
  void listen(std::function<void(Segment&)> complete) { complete_ = std::move(complete); }

  /// Before a micro-batch's first gradients. `boundary`: the last one before a step, when replicas agree.
  void begin(bool boundary) { boundary_ = boundary; }
  /// Folds `full` (this rank's gradients of the padded segment) over ranks into the segment's lasting
  /// gradients, onto what they hold when `accumulate`. Keeps `full` until it was read; null means the lasting
  /// gradients themselves.
  void submit(Segment& segment, std::shared_ptr<const Tensor> full, bool accumulate);
  /// At the boundary: the lasting gradients are this rank's sum already, which only the replicas have to
  /// agree on.
  void submit_sum(Segment& segment);
  /// Sends what is left and waits for everything.
  void finish();
  /// Forgets what was submitted and not sent, after a pass that an exception ended on all ranks alike; waits for what is
  /// under way.
  void abandon();

  const ParameterGroups& groups() const { return groups_; }

 private:
  /// How replicas come to agree on a segment: not yet, by the chain of folds, or by adding up their sums.
  enum class Agreement : std::uint8_t { none, chain, sum };
  struct Item {
    Segment* segment;
    std::shared_ptr<const Tensor> full;  ///< null: nothing to fold, only to agree on
    std::shared_ptr<const Tensor> sums;  ///< of the shard; null: its lasting gradients
    bool accumulate;
    Agreement agreement;
    std::int64_t sent = 0;  ///< elements of the shard already in a bucket
  };
  /// Elements [begin, end) of an item's shard.
  struct Part {
    Item item;
    std::int64_t begin, end;
    Tensor shard() const { return item.sums ? *item.sums : item.segment->own_gradients(); }
    Tensor sums() const { return shard().range(begin, end); }
  };
  /// A bucket on its way.
  struct Flight {
    std::vector<Part> parts;
    std::vector<Segment*> complete;  ///< whose last part this is
    std::string label;
    std::vector<comm::Work> incoming, outgoing, agreed;  ///< between replicas
    comm::Work reduced, gathered;
  };

  void push(Item item);
  void send_bucket();
  std::int64_t bucket_limit() const;
  /// Moves flights on: what is due now, or, when draining, all to their end. Where nobody listens `tell` is
  /// false.
  void progress(bool drain, bool tell = true);
  void issue(Flight& flight);
  void pass_on(Flight& flight);
  void agree(Flight& flight);
  void settle(Flight& flight, bool tell);
  void gather_sums(Flight& flight);
  comm::CallOptions options_for(const Flight& flight) const;
  bool chained() const { return groups_.replica && options_.reduction == comm::Reduction::ordered; }

  ParameterGroups groups_;
  tensor::Kernels& kernels_;
  ExchangePool* replica_pool_;
  ReducerOptions options_;
  bool boundary_ = true;
  std::deque<Item> queue_;
  std::int64_t queued_ = 0;  ///< elements in queue_ not yet sent
  std::deque<Flight> flights_;
  std::size_t issued_ = 0, passed_ = 0, agreed_ = 0;  ///< of flights_, from its front
  std::function<void(Segment&)> complete_;
  ReducerStats& stats_;
};

}  // namespace sherd::sharding

#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sharding/gradients/turns.h"
#include "sharding/segment.h"

namespace sherd::sharding {

/// Counts for tests and reports.
struct ReducerStats {
  std::int64_t buckets = 0;         ///< reduce-scatters issued
  std::int64_t largest_bucket = 0;  ///< elements of the largest one, over all ranks' parts
  std::int64_t overlapped = 0;      ///< buckets that were issued on the communicator's own thread
};

/// How gradients are reduced.
struct ReducerOptions {
  DType rounding = DType::f32;  ///< each rank's contribution travels as this (communication_data_type)
  /// Bound of one reduce-scatter; 0 sends each segment by itself.
  std::int64_t bucket_elements = 500'000'000;
  bool overlap = false;  ///< on the communicator's thread; how many at a time: Turns
  Reduction reduction = Reduction::ordered;
  bool compare_replicas = false;  ///< replicas compare what they have exchanged as a step finishes
};

/// Sends finished gradients off in buckets while backward goes on: folds each segment onto its shard of the
/// sum, exchanges sums between replicas at the boundary, and gathers the sum again where every rank updates
/// everything.
///
/// Ordered, every element is a fold over ranks in rank order, so no bucket size changes a bit. Replicas form
/// a chain: each folds its ranks' gradients onto the sums of the replica before it, and the last one's sums
/// come back; which is the fold over all ranks. Where micro-batches were summed before the boundary, replicas
/// add their own sums in replica order. These are transfers between neighbours: they do not wait for each
/// other in the communicator, as collectives would.
///
/// Serves the segments of one RankGroups, or of all that one group of replicas has: these match transfers by
/// their order, whatever shard groups they are for. Used from the rank's thread; all ranks of these groups
/// submit the same segments in the same order, at the same points of their programs: what some of them leave
/// out (experts) has a group of replicas of its own. When a bucket is dealt with, Turns says.
class Reducer {
 public:
  /// `stats` are counted up. To `complete` goes each segment whose last gradients of the step have been
  /// summed, from submit(), settle() or finish(): at the same points of the program on all ranks. With
  /// replicas, which are some buckets apart until then, from finish() alone.
  Reducer(const RankGroups& groups, tensor::Kernels& kernels, const ReducerOptions& options,
          std::vector<Segment*>& complete, ReducerStats& stats)
      : groups_(groups),
        kernels_(kernels),
        options_(options),
        turns_({groups.replicas(), groups.replica_index(), chained(), options.overlap}),
        complete_(complete),
        stats_(stats) {}

  /// Folds `full` (this rank's gradients of the padded segment, of each of Segment::sources() one after the
  /// other where they lie apart) over ranks into the segment's lasting gradients, onto what they hold when
  /// `accumulate`. Keeps `full` until it was read; null means the lasting gradients themselves. `last`: of
  /// the step, with which replicas agree. Of one rank alone, only the ranges `apart` are folded: operations
  /// have folded the rest.
  void submit(Segment& segment, std::shared_ptr<const Tensor> full, bool accumulate, bool last,
              std::span<const Segment::Range> apart);
  /// The lasting gradients are the sum over this shard group and the step already, which only the replicas
  /// have to agree on.
  void submit_sum(Segment& segment);
  /// Sends what is left, and waits for everything, but for replicas.
  void settle();
  /// At the end of a step: sends what is left and waits for everything.
  void finish();
  /// Forgets what was submitted and not sent, after a pass that an exception ended on all ranks alike; waits
  /// for what is under way, unless that has failed itself.
  void abandon();
  /// The next micro-batch is the first of a step.
  void clear() { agreed_on_.clear(); }

  /// Takes segments of these groups.
  bool serves(const RankGroups& groups) const {
    return groups_.replica ? groups.replica == groups_.replica : groups == groups_;
  }
  /// Names all that replicas have exchanged in this step, block by block; empty without replicas. Transfers
  /// do not compare what they are for: without ReducerOptions::compare_replicas, whoever calls a collective
  /// over replicas next puts this in its label.
  const std::string& agreed_on() const { return agreed_on_; }

 private:
  /// How replicas come to agree on a segment: not yet, by folding onto each other's sums, or by adding their
  /// own.
  enum class Agreement : std::uint8_t { none, fold, add };
  struct Item {
    Segment* segment;
    std::shared_ptr<const Tensor> full;  ///< null: nothing to fold, only to agree on
    Tensor sums;                         ///< the shard's sums; undefined: its lasting gradients
    bool accumulate, last;
    Agreement agreement;
    std::int64_t sent = 0;  ///< elements of the shard already in a bucket
  };
  /// Elements [begin, end) of an item's shard.
  struct BucketPart {
    Item item;
    std::int64_t begin, end;
    Tensor shard() const { return item.sums.defined() ? item.sums : item.segment->own_gradients(); }
    Tensor sums() const { return shard().range(begin, end); }
  };
  /// The items of one shard group that wait for a bucket.
  struct Queue {
    comm::Communicator& shard;
    std::deque<Item> items;
    std::int64_t elements = 0;  ///< not yet sent
  };
  /// A part of which each rank gives several tensors, in the order of the ranks and of each one's sources.
  struct BySource {
    Tensor sent, received;  ///< [ranks, sources, elements], rounded
    Tensor sums;
    bool onto;
    comm::Work work;
  };
  /// A bucket on its way.
  struct Bucket {
    bool last = true;                     ///< all of its items are the last of their step
    comm::Communicator* shard = nullptr;  ///< the ranks over which it is summed
    std::vector<BucketPart> parts;
    Tensor end;                      ///< travels behind the last bucket, in a bucket without parts
    std::vector<Segment*> complete;  ///< segments whose last part is in it
    std::string label;
    std::vector<comm::Work> incoming, results, outgoing;  ///< between replicas
    std::vector<BySource> by_source;                      ///< on their way to those who fold them
    comm::Work reduced, gathered;
  };

  void push(Item item);
  Tensor sums_of(const Segment& segment) const;
  void send_bucket(Queue& queue);
  void send_end();
  std::int64_t bucket_limit(const Queue& queue) const;
  Queue& queue_of(const Segment& segment);
  void send_buckets(Queue& queue);
  void launch(Bucket bucket);
  void drain();
  void take(const std::vector<Turn>& turns);
  void take(const Turn& turn);
  void tell_complete();
  void issue(Bucket& bucket);
  void pass_on(Bucket& bucket);
  void pass_back(Bucket& bucket);
  void settle(Bucket& bucket);
  BySource send_sources(const BucketPart& part, const Tensor& shard, bool onto, const Bucket& bucket);
  void finish_sums(Bucket& bucket);
  void gather_sums(Bucket& bucket);
  void compare_replicas();
  comm::CallOptions options_for(const Bucket& bucket) const;
  enum class Direction : std::uint8_t { receive, send };
  void transfer(Direction direction, int replica, const Bucket& bucket, std::vector<comm::Work>& works);
  bool first() const { return groups_.replica_index() == 0; }
  bool last() const { return groups_.replica_index() + 1 == groups_.replicas(); }
  bool chained() const { return groups_.replica && options_.reduction == Reduction::ordered; }

  RankGroups groups_;
  tensor::Kernels& kernels_;
  ReducerOptions options_;
  std::string agreed_on_;
  std::deque<Queue> queues_;  ///< in the order in which segments name their groups
  Turns turns_;
  std::deque<Bucket> buckets_;
  std::size_t settled_ = 0;       ///< buckets before these
  std::vector<Segment*> summed_;  ///< segments that `complete_` has still to be told of
  bool failed_ = false;           ///< a turn has thrown; what buckets hold is nothing to pass on
  std::vector<Segment*>& complete_;
  ReducerStats& stats_;
};

}  // namespace sherd::sharding

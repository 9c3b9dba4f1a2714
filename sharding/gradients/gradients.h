#pragma once

// This folder sums the gradients of a step: over micro-batches, over the shard group, and over replicas.
//
// Backward writes a segment's gradients where open() says. Once a block's backward is through, close() gives
// them to the Reducer, which sends buckets off while backward goes on. Each rank's part is rounded alone to
// the communication type and added in fp32, in rank order, onto what was summed before. Each micro-batch's
// gradient is formed from zero and folded so, in the global order of micro-batches; that is why the number of
// ranks changes no bit (docs/guarantees.md, "Equal to the bit").
//
// To change, look at:
// - buckets, and what is sent when: reducer.cpp; the sum itself: comm/exchange/reductions.cpp, comm/isa/
// - when a bucket is folded, passed from replica to replica, and comes back, and why nobody waits for ever:
//   turns.h; tests/sharding/replica_simulation.h runs all ranks of a layout without their work
// - the exact norm: Gradients::sum_of_squares(); clipping: optim/clipping.h
// - gradients that a rank finds of several ranks' micro-batches (experts): Segment::sources(),
//   Reducer::send_sources()
// - replicas that exchange momentum instead: set_keeps_own()
// - gradients that leave a GPU beside backward: gradient_traffic.h

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "sharding/gradients/gradient_traffic.h"
#include "sharding/gradients/reducer.h"

namespace sherd::sharding {

/// The sums of gradients that the micro-batches of a step form in the lasting gradients of segments: over
/// this rank's micro-batches, the shard group and the replicas. One per ShardedModel, used from the rank's
/// thread; all ranks open and close the same segments in the same order.
class Gradients {
 public:
  /// `model_ranks`: all that hold parts of the model, over which the norm is summed.
  Gradients(tensor::Kernels& kernels, comm::Communicator& model_ranks, const ReducerOptions& options);
  ~Gradients();
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  /// A segment that trains; in the order of units.
  void add(Segment& segment);
  const std::vector<Segment*>& segments() const { return segments_; }
  /// `keeps_own` is asked, as the first micro-batch of a step comes to a segment, whether replicas keep their
  /// own sums of it, the same on all ranks. By default they never do.
  void set_keeps_own(std::function<bool(const Segment&)> keeps_own) { keeps_own_ = std::move(keeps_own); }

  // ---- a micro-batch ----
  /// Where a parameter's gradient of the micro-batch is: autograd::Parameter::grad_written, sources_written,
  /// GradientSum::folded.
  enum class Written : std::uint8_t { nowhere, apart, by_source, folded };
  /// One segment's gradients while a micro-batch writes them.
  struct Open {
    /// The memory that backward writes to, for each source apart unless operations fold; null: the lasting
    /// gradients.
    std::shared_ptr<const Tensor> full;
    std::shared_ptr<const Tensor> sum;  ///< goes back where gradients leave a GPU, else null; may be `full`
    bool onto = false;                  ///< the step has a sum already
    std::optional<DType> fold;          ///< operations may fold theirs, rounded so, into where they last;
                                        ///< of several sources they do
    /// The state of each parameter's gradient while it has this memory; empty where passes share the memory,
    /// so that states stay as they are.
    std::vector<Written> written;
    bool shared = false;
    std::int64_t turn = 0;  ///< its number among all that were opened for the segment in this step
    bool in_place() const { return full == sum; }
  };
  /// Memory for this micro-batch's gradients; what has to be formed apart comes from `pool`.
  Open open(Segment& segment, ExchangePool& pool);
  /// Sends off a segment's gradients, which are complete, but for those that operations have folded: `apart`
  /// are the ranges of the others. `last`: no gradient is added to the segment's any more in this step, and
  /// ranks and replicas agree on the sum.
  void close(Segment& segment, Open open, bool last, std::span<const Segment::Range> apart);
  /// Returns when all that was closed has been summed over the shard groups. Waits for no replicas, which may
  /// be stages of a pipeline, and elsewhere in their step. Collective.
  void settle();
  /// All micro-batches of the step have been closed: returns when everything is summed, over replicas too.
  /// Collective.
  void finish();
  /// Segments whose gradients do not change any more before the update, since the last call: at the same
  /// points of the program on all ranks, mostly while backward goes on. Those that the step's last
  /// micro-batch left out may not be among them.
  std::vector<Segment*> take_complete() { return std::exchange(complete_, {}); }

  // ---- the step ----
  /// The sum of squares of all gradients, exact, and so the same for any placement; where replicas keep their
  /// own, which are sums over fewer ranks, the mean over replicas of what each would have if all were like
  /// it. Collective over all ranks that hold parts of the model. Throws Error{usage} on all of them where
  /// tensor ranks have found different gradients for what each of them holds whole: a model of one's own
  /// lacks a reduction.
  tensor::ExactSum sum_of_squares();
  /// Adds up exact sums over these ranks. Collective. `label`: what they are.
  void sum_over_ranks(std::span<tensor::ExactSum> sums, const std::string& label);
  /// All that hold parts of the model.
  comm::Communicator& model_ranks() { return model_ranks_; }
  /// Drops the sums: the next micro-batch begins a step.
  void clear();
  /// Forgets what a pass that an exception ended has left to send; waits for what is under way.
  void abandon();

  ReducerStats& stats() { return stats_; }

 private:
  bool has_sum(const Segment& segment) const;
  void agree(Segment& segment);
  void fill_missing();
  Reducer& reducer_of(const Segment& segment);

  tensor::Kernels& kernels_;
  comm::Communicator& model_ranks_;
  ReducerOptions options_;
  ReducerStats stats_;
  std::vector<Segment*> segments_;
  std::deque<Reducer> reducers_;              ///< by groups, in the order in which segments name them
  std::unique_ptr<GradientTraffic> traffic_;  ///< for one rank whose gradients leave its GPU, else null
  std::vector<Segment*> summed_;              ///< segments whose lasting gradients hold a sum
  std::vector<Segment*> complete_;
  struct TurnCounts {
    std::int64_t opened = 0, closed = 0;
  };
  std::map<const Segment*, TurnCounts> turns_;  ///< counted within this step
  std::function<bool(const Segment&)> keeps_own_;
  std::set<const Segment*> agreed_;  ///< closed for the step
};

}  // namespace sherd::sharding

#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "nn/module.h"
#include "sharding/gradient_traffic.h"
#include "sharding/ownership.h"
#include "sharding/placement.h"
#include "sharding/publisher.h"
#include "sharding/reducer.h"
#include "sharding/residency.h"

namespace sherd::sharding {

/// How a model is sharded. Sizes in elements.
struct ShardingOptions {
  PlacementTable placements;
  std::vector<StateFormat> rules{StateFormat{}};  ///< of the update rules; SegmentKey::rule counts them
  /// Which of them updates a parameter; null: the first.
  std::function<int(const autograd::Parameter&)> rule_of = nullptr;
  std::uint64_t seed = 0;  ///< of the initial values
  ResidencyLimits residency;
  std::int64_t persistence_threshold = 0;        ///< parameters of at most this many elements stay gathered
  std::int64_t model_persistence_threshold = 0;  ///< … while their sum is at most this
  std::int64_t reduce_bucket = 500'000'000;
  std::int64_t gather_bucket = 500'000'000;  ///< per all-gather of updated parameters
  bool overlap = false;
  /// Native: by the backend's own collectives where it has them, and one rank accumulates where backward
  /// writes.
  comm::Reduction reduction = comm::Reduction::ordered;
  double optimizer_offload_ratio = 1;  ///< share of the elements whose optimizer states leave the device
  std::int64_t parameters_in_host =
      0;                      ///< elements per rank that stay in the host tier although NVMe is asked for
  int parameter_buffers = 5;  ///< through which parameters come from NVMe
  std::int64_t parameter_buffer_elements = 100'000'000;  ///< most that one of them may hold
};

/// The options that a configuration asks for, with one update rule that keeps `moments` tensors.
ShardingOptions make_sharding_options(const config::Config& config, int moments);

/// A model whose parameters, gradients and optimizer states are spread over groups of ranks.
///
/// Cuts the model into units (one per block, the rest forms the root unit), gives every parameter storage by
/// the placement table, and hangs itself onto the modules' scopes, so that running the model takes leases and
/// sends gradients off. One per rank, used from its thread; construction and everything marked so is
/// collective.
class ShardedModel {
 public:
  /// Collective. Names the model's parameters and draws their initial values: no rank holds more than its
  /// placements say. Throws Error{usage} where another ShardedModel, of this rank or one on another thread,
  /// has the model or a part of it; nothing is touched then.
  ShardedModel(std::shared_ptr<nn::Module> model, const ShardingOptions& options,
               const StateSources& sources);
  /// Takes itself off the modules.
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  nn::Module& model() const { return *model_; }
  const ShardingOptions& options() const { return options_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return residency_.units(); }
  /// Every segment that trains, in the order of units.
  std::vector<Segment*> trainable_segments() const;
  std::int64_t parameter_count() const { return parameter_count_; }
  std::int64_t persistent_elements() const { return persistent_elements_; }

  // ---- a micro-batch ----
  /// Before forward. `boundary`: the last micro-batch before a step, when replicated gradients are reduced
  /// too.
  void begin_training(bool boundary);
  /// After backward; collective. Every gradient that this micro-batch had to send has arrived.
  void end_training();
  /// `complete` is told, before end_training() returns, of each segment whose gradients will not change any
  /// more before the step, and whose parameters this pass no longer reads: at the same points of the program
  /// on all ranks, on the rank's thread, mostly while backward goes on. Not of segments that the last
  /// micro-batch left out. Nobody but the pass may hold a lease then.
  void listen(std::function<void(Segment&)> complete) { complete_ = std::move(complete); }
  void begin_evaluation();
  void end_evaluation();
  /// Lets go of what a pass or step that an exception ended has left: leases of its blocks, gathered
  /// parameters that later steps outdate, gradients and updates that were not sent yet. Nothing otherwise.
  /// Every pass begins with it.
  void abandon_pass();

  // ---- the step ----
  /// Throws Error{usage} while somebody holds a lease on gathered parameters: an update would not reach that
  /// copy, and the coming passes would compute with it.
  void require_no_leases() const;
  /// Collective over all ranks that hold parts of the model: the sum of squares of all gradients, exact, and
  /// so the same for any placement.
  tensor::ExactSum gradient_sum_of_squares();
  /// Collective: to be called for every trainable segment, in one order on all ranks, once its update range
  /// has new parameters; gathers them where parameters are replicated, in buckets.
  void publish(Segment& segment);
  /// Collective: waits for everything published, and clears gradients for the next accumulation.
  void end_step();
  /// Drops gathered gradients without an update (a skipped step).
  void clear_gradients();

  /// Full parameters of the unit that stores `parameter`; collective where sharded.
  Unit::Lease gather(const autograd::Parameter& parameter);

  ResidencyStats& residency_stats() { return residency_.stats(); }
  ReducerStats& reducer_stats() { return reducer_stats_; }

 private:
  class BlockScope;
  /// One segment's gradients while a micro-batch writes them.
  struct OpenGradients {
    std::shared_ptr<const Tensor> full;  ///< where backward writes; null: where they last
    std::shared_ptr<const Tensor> sum;   ///< of gradients that leave a GPU: what goes back; may be `full`
  };
  struct UnitState {
    int pending = 0;                       ///< uses in forward whose backward is still to come
    bool open = false;                     ///< parameters take gradients
    bool sent = false;                     ///< gradients of this micro-batch were submitted
    std::vector<OpenGradients> gradients;  ///< per trainable segment, while open
  };

  void build_units();
  /// What is left while segments are placed one after the other.
  struct Budget {
    std::int64_t persistent;  ///< elements that may stay gathered
    std::int64_t host;        ///< elements per rank that may stay in the host tier
    double offload;           ///< elements whose optimizer states are still to leave the device
  };
  void make_segments(Unit& unit, const std::vector<ParameterPtr>& parameters, Budget& budget);
  PlacementTable place(const SegmentKey& key, const SegmentLayout& layout, Budget& budget) const;
  bool is_filled(const Segment& segment) const;
  void fill_missing_gradients();
  void open_gradients(Unit& unit);
  OpenGradients open_gradients(Segment& segment);
  void close_gradients(Unit& unit);
  void send_gradients(Segment& segment, OpenGradients open);
  void submit_left_behind();
  void tell_complete(Segment& segment);
  Reducer& reducer_of(const Segment& segment);
  void add_reducer(const ParameterGroups& groups);
  UnitState& state(const Unit& unit) { return states_[static_cast<std::size_t>(unit.index())]; }

  std::shared_ptr<nn::Module> model_;
  Claim claim_;
  ShardingOptions options_;
  StateSources sources_;
  comm::Communicator& model_ranks_;
  tensor::Kernels& kernels_;
  Residency residency_;
  ReducerStats reducer_stats_;
  std::deque<Reducer> reducers_;              ///< by groups, in the order in which segments name them
  std::deque<Publisher> publishers_;          ///< by shard group, likewise
  std::unique_ptr<GradientTraffic> traffic_;  ///< of one rank whose gradients leave its GPU, else null
  std::vector<UnitState> states_;
  std::vector<std::shared_ptr<BlockScope>> scopes_;
  std::vector<std::pair<ParameterPtr, Unit*>> owners_;
  std::vector<Segment*> filled_;  ///< segments whose lasting gradients hold a sum
  bool boundary_ = true;
  std::function<void(Segment&)> complete_;
  std::int64_t parameter_count_ = 0, persistent_elements_ = 0;
};

}  // namespace sherd::sharding

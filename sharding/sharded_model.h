#pragma once

// This folder shards a model over ranks: which rank keeps which part of each parameter, gradient and
// optimizer state, when parameters are gathered, and how gradients are summed.
//
// A *unit* is one block's parameters (nn::Module::mark_block(); by default each child of a layer list). One
// more unit holds the rest, of the model or of each of its parts (nn::LayeredModel). A unit lies in flat
// *segments*, keyed by what their parameters share (SegmentKey): whether they train, whether they stay
// gathered, their shard group, replica group and update rule. Rates, decay and betas are no keys: the
// optimizer takes a segment parameter by parameter, each with its group's values. Gradients are sums
// everywhere; the update takes the mean.
//
// States are sharded inside a shard group (context and data ranks) and equal on every rank of a replica group
// (parallel.shard_size; MiCS, Zhang et al. 2022). A parameter that all tensor ranks hold has a copy on each,
// which finds the same gradient; where each finds a part of it (Parameter::partial_gradient), the shard group
// spans tensor ranks, and sums. A rank stores what its parts of the model use. A table that several pipeline
// stages use has copies that are replicas, which add their sums as a step ends. Norms and files take a copy
// once (RankGroups::holder()). The shard group of experts that expert ranks share out
// (Parameter::expert_rank) is the ranks with the same ones, and each rank finds the gradients of all its
// expert ranks' micro-batches (RankGroups::sources).
//
// To change, look at:
// - what a ZeRO stage or an offload keeps where: make_placements(), placement.cpp; nothing else asks for the
//   stage
// - what forms a unit or a segment: ownership.cpp; SegmentKey, segment.h
// - one micro-batch's tape, its blocks' leases and open gradients: pass.cpp
// - scales of 8-bit moments, fp32 in checkpoints: Segment::scales(), read_state(), write_state(), state.h
// - when a unit is gathered and released: units/; how gradients are summed: gradients/
// - the order of a step: schedule/, made of the instructions of instruction.h
// - layers that ranks share: parallel/, which knows no units

#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nn/layered_model.h"
#include "sharding/gradients/gradients.h"
#include "sharding/instruction.h"
#include "sharding/ownership.h"
#include "sharding/pass.h"
#include "sharding/placement.h"
#include "sharding/units/publisher.h"
#include "sharding/units/residency.h"

namespace sherd::sharding {

/// How a model is sharded. Sizes in elements.
struct ShardingOptions {
  PlacementTable placements;
  std::vector<StateFormat> rules{StateFormat{}};  ///< one for each update rule; SegmentKey::rule counts them
  /// Which of them updates a parameter; null: the first.
  std::function<int(const autograd::Parameter&)> rule_of = nullptr;
  /// Parts of an nn::LayeredModel that this rank computes, in ascending order; empty: all. Parameters that
  /// none of them uses are not stored here, but have their names and shapes.
  std::vector<Chunk> parts;
  int expert_rank = 0;     ///< parameters of others (Parameter::expert_rank) are not stored here either
  std::uint64_t seed = 0;  ///< initial values are drawn from it
  ResidencyLimits residency;
  std::int64_t persistence_threshold = 0;        ///< parameters of at most this many elements stay gathered
  std::int64_t model_persistence_threshold = 0;  ///< … while their sum over the whole model is at most this
  std::int64_t reduce_bucket = 500'000'000;
  std::int64_t gather_bucket = 500'000'000;  ///< per all-gather of updated parameters
  bool overlap = false;
  /// Called once the model is this one's alone, before its parameters are stored; may be empty.
  std::function<void()> claimed = nullptr;
  bool gather_in_fp8 = false;  ///< weights of products in FP8 (autograd::Parameter::fp8), where sharded
  /// Native: by the backend's own collectives where it has them, and one rank accumulates where backward
  /// writes.
  Reduction reduction = Reduction::ordered;
  double optimizer_offload_ratio = 1;  ///< share of the elements whose optimizer states leave the device
  /// Elements per rank that stay in the host tier although NVMe is asked for.
  std::int64_t parameters_in_host = 0;
  int parameter_buffers = 5;                             ///< through which parameters come from NVMe
  std::int64_t parameter_buffer_elements = 100'000'000;  ///< most that one of them may hold
};

/// The options that a configuration asks for, but for what its update rules keep.
ShardingOptions make_sharding_options(const config::Config& config);

/// A model whose parameters, gradients and optimizer states are spread over groups of ranks.
///
/// Cuts the model into units (one per block, and one of what else a part of an nn::LayeredModel has; the rest
/// forms the root unit), gives every parameter storage by the placement table, and hangs itself onto the
/// modules' scopes, so that running the model takes leases and sends gradients off. One per rank, used from
/// its thread; construction and everything marked so is collective.
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

  /// The groups, kernels and stores that it was made with.
  const StateSources& sources() const { return sources_; }
  nn::Module& model() const { return *model_; }
  const ShardingOptions& options() const { return options_; }
  /// The units whose parameters this rank's parts use; in the order of the model.
  const std::vector<std::unique_ptr<Unit>>& units() const { return residency_.units(); }
  /// Every segment that trains, in the order of units.
  const std::vector<Segment*>& trainable_segments() const { return gradients_.segments(); }
  /// Elements that this rank's parts use, each once, of which it stores its shard; of a model that no
  /// pipeline cuts, all.
  std::int64_t parameter_count() const { return parameter_count_; }
  /// The ones among them that stay gathered.
  std::int64_t persistent_elements() const { return persistent_elements_; }
  /// How many parts the whole nn::LayeredModel has; other models have one.
  std::size_t parts() const { return layered_ ? layered_->parts() : 1; }
  /// Whether this rank computes all of these parts.
  bool has_parts(const Chunk& parts) const;
  /// The units whose parameters these parts of this rank use, in the order of units().
  std::vector<Unit*> units_of(const Chunk& parts) const;
  /// The lowest part of this rank that uses parameters of `unit`.
  std::size_t lowest_part(const Unit& unit) const {
    return lowest_parts_[static_cast<std::size_t>(unit.index())];
  }

  // ---- the step ----
  /// Around the passes of a list of instructions (sharding/schedule/), which may leave gaps between them.
  /// Where the list gathers chunks, `gathers` are its instructions `gather` and `release`, and `chunks` what
  /// their numbers mean: units come and go as these say. Else units are gathered and kept by a plan for the
  /// whole list, made from the list before. Abandons what an exception has left. Training passes outside of
  /// lists are planned for as long as one is under way.
  void begin_list(std::span<const Instruction> gathers = {}, std::span<const Chunk> chunks = {});
  /// All passes have ended; whatever is gathered and not leased is dropped.
  void end_list();
  /// Called behind the last pass of a step: returns when its gradients are summed over all ranks that share
  /// them. Collective, over the stages of a pipeline too.
  void finish_gradients() { gradients_.finish(); }
  /// Throws Error{usage} while somebody holds a lease on gathered parameters: an update would not reach that
  /// copy, and the coming passes would compute with it.
  void require_no_leases() const;
  /// The same of one segment's unit, whose update is about to begin beside backward.
  void require_no_leases(const Segment& segment) const;
  /// The sums of the step so far.
  Gradients& gradients() { return gradients_; }
  const Gradients& gradients() const { return gradients_; }
  /// Collective: to be called for every trainable segment, in one order on all ranks, once its update range
  /// has new parameters; gathers them where parameters are replicated, in buckets.
  void publish(Segment& segment);
  /// Collective: waits for everything published, and clears gradients for the next accumulation.
  void end_step();
  // ---- an update beside the next step's forward; see Residency ----
  /// The parameters of everything that trains are going to change. `finish`: as
  /// Residency::set_finish_changes().
  void begin_changes() { residency_.begin_changes(); }
  void set_finish_changes(std::function<void()> finish) { residency_.set_finish_changes(std::move(finish)); }
  /// Starts to gather a unit in a list that says so.
  void gather_ahead(Unit& unit) { residency_.gather_ahead(unit); }
  void let_stay(Unit& unit, bool stays) { residency_.let_stay(unit, stays); }
  bool may_change(const Segment& segment) const { return residency_.may_change(segment); }
  void changed(const Segment& segment, std::int64_t begin, const Tensor& to, bool last) {
    residency_.changed(segment, begin, to, last);
  }
  /// Waits for what was published, and lets the units be gathered. Collective.
  void end_changes(std::span<Unit* const> units);
  bool changes() const { return residency_.changes(); }
  void abandon_changes() noexcept { residency_.abandon_changes(); }
  /// Called when all parameters, frozen ones too, have other values than before, as after loading.
  /// Collective.
  void values_changed() { residency_.forget_scales(false); }

  /// Lets go of what passes or a step that an exception ended have left: leases of blocks, gathered
  /// parameters that later steps outdate, gradients and updates that were not sent yet. Nothing otherwise.
  void abandon_passes();

  /// Whether this rank's stage of the pipeline has the parameter: all of them do without stages.
  bool has(const ParameterPtr& parameter) const { return elsewhere_.count(parameter.get()) == 0; }
  /// Full parameters of the unit that stores `parameter`, exact ones also where passes gather in FP8;
  /// collective where sharded. Throws Error{usage} for one that only other stages of a pipeline have, and for
  /// one that a pass has gathered in FP8 and still holds.
  Unit::Lease gather(const autograd::Parameter& parameter);

  ResidencyStats& residency_stats() { return residency_.stats(); }
  ReducerStats& reducer_stats() { return gradients_.stats(); }

 private:
  friend class Block;
  friend class Pass;

  void build_units();
  void find_own_parameters();
  void find_persistent(const std::vector<BlockParameters>& blocks);
  void find_lowest_parts();
  /// The room that is left while segments are placed one after the other.
  struct Budget {
    std::int64_t host;  ///< elements per rank that may stay in the host tier
    double offload;     ///< elements whose optimizer states are still to leave the device
  };
  void make_segments(Unit& unit, const std::vector<ParameterPtr>& parameters, Budget& budget);
  PlacementTable place(const SegmentKey& key, const SegmentLayout& layout, Budget& budget) const;
  void add_publisher(comm::Communicator& group);
  Unit& unit_of(const autograd::Parameter& parameter) const;
  Pass& pass_of(const autograd::Tape& tape) const;
  void begin_pass(Pass& pass, Residency::Mode kind);
  void end_pass(Pass& pass);
  bool pass_under_way() const;

  std::shared_ptr<nn::Module> model_;
  nn::LayeredModel* layered_;  ///< the same, where it is one, else null
  Claim claim_;
  ShardingOptions options_;
  StateSources sources_;
  tensor::Kernels& kernels_;
  Residency residency_;
  Gradients gradients_;
  std::deque<Publisher> publishers_;  ///< by shard group, in the order in which segments name them
  std::vector<std::shared_ptr<Block>> blocks_;
  std::unordered_map<const autograd::Parameter*, std::pair<ParameterPtr, Unit*>> owners_;
  std::vector<std::size_t> lowest_parts_;                     ///< by unit
  std::unordered_set<const autograd::Parameter*> elsewhere_,  ///< not stored on this rank
      persistent_;
  std::vector<Pass*> passes_;    ///< all there are
  std::vector<Pass*> attached_;  ///< by unit: whose gradients its parameters take; null: nobody's
  bool in_list_ = false;
  std::int64_t parameter_count_ = 0, persistent_elements_ = 0;
};

}  // namespace sherd::sharding

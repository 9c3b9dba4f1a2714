#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/stream.h"
#include "optim/description.h"
#include "sharding/layout.h"
#include "sharding/placement.h"
#include "sharding/state.h"
#include "sharding/units/frozen.h"
#include "tensor/formats/stored_format.h"
#include "tensor/slice.h"

namespace sherd::sharding {

/// The states that an update rule keeps of its parameters.
struct StateFormat {
  std::vector<optim::State> states;       ///< tensors per element, beside the masters
  std::int64_t block = layout_alignment;  ///< elements that lie on one rank together
};

/// The properties that all parameters of one flat segment share.
struct SegmentKey {
  bool trainable = true;
  bool persistent = false;  ///< stays gathered although parameters are sharded (param_persistence_threshold)
  RankGroups groups;
  int rule = 0;  ///< which of ShardingOptions::rules updates them
  /// The format of blocks in which parameters are kept; their full values come and go. `compute`: no blocks.
  StoredFormat format = StoredFormat::compute;
  bool fp8 = false;  ///< are gathered in FP8 (units/fp8_weights.h)
  bool in_blocks() const { return format != StoredFormat::compute; }
  bool operator==(const SegmentKey&) const = default;
};

/// Writes a parameter's initial values, from its local element `first` on, to `values`, in fp32: a function
/// of seed, name and logical index.
void draw_initial(const autograd::Parameter& parameter, const Tensor& values, std::int64_t first,
                  std::uint64_t seed, tensor::Kernels& kernels);

/// A flat run of parameters of one unit with all model states that this rank holds of it.
class Segment {
 public:
  using Range = tensor::Range;  ///< flat elements [begin, end)
  /// Collective over the shard group where memory is shared with peers. Draws the initial values of what this
  /// rank holds, in small chunks, straight into the tier where they live.
  Segment(std::string name, SegmentKey key, std::vector<ParameterPtr> parameters, const PlacementTable& table,
          const StateFormat& format, std::uint64_t seed, const StateSources& sources);

  const std::string& name() const { return name_; }
  const SegmentKey& key() const { return key_; }
  const RankGroups& groups() const { return key_.groups; }
  device::Device& device() const { return kernels_.device(); }
  tensor::Kernels& kernels() const { return kernels_; }
  const SegmentLayout& layout() const { return layout_; }
  /// Whether full parameters come and go: this rank keeps its shard (over one rank, all) in memory that
  /// modules do not see.
  bool parameters_sharded() const { return parameters_sharded_; }
  /// The dtype in which modules see them. parameters() has the same, but uint8 where SegmentKey::in_blocks().
  DType compute_dtype() const { return compute_dtype_; }
  /// The place in parameters() of flat element `element`, the first of a block, and how many elements of
  /// parameters() so many take: bytes where SegmentKey::in_blocks(), else the same number.
  std::int64_t stored(std::int64_t element) const {
    return key_.in_blocks() ? tensor::stored_bytes(key_.format, element) : element;
  }
  /// Whether each micro-batch's gradients begin at zero and are folded onto the lasting ones, which hold this
  /// rank's shard of the sum; else backward accumulates into the lasting ones, which are reduced at the
  /// boundary.
  bool folds_gradients() const { return folds_gradients_; }
  /// The number of sources of a micro-batch's gradients, which are folded apart (RankGroups::sources).
  int sources() const { return folds_gradients_ ? key_.groups.sources : 1; }
  /// Backward cannot write where gradients last: they are a shard, or lie off the device.
  bool gradients_staged() const { return gradients_staged_; }
  /// Every rank updates the whole segment, and so needs the whole sum of gradients.
  bool optimizer_replicated() const { return !optimizer_sharded_; }
  /// Updated shards have to be gathered into the full parameters.
  bool gather_after_update() const { return gather_after_update_; }
  MasterForm master_form() const { return master_form_; }

  /// This rank's part of the flat segment.
  std::int64_t own_begin() const { return own_begin_; }
  std::int64_t own_end() const { return own_begin_ + layout_.shard(); }
  /// The part that this rank's optimizer updates: its own, or all where optimizer states are replicated.
  std::int64_t update_begin() const { return optimizer_sharded_ ? own_begin_ : 0; }
  std::int64_t update_end() const { return optimizer_sharded_ ? own_end() : layout_.padded(); }

  /// Compute parameters, or their blocks: the whole segment where replicated, else this rank's shard. Places
  /// in it are stored() ones.
  const StateBuffer& parameters() const { return parameters_; }
  StateBuffer& parameters() { return parameters_; }
  /// Lasting gradients: whole or shard; none when frozen.
  const StateBuffer& gradients() const { return gradients_; }
  /// The masters of the update range, as the optimizer keeps them: fp32, or uint16 low halves; none where the
  /// parameters are the masters.
  const StateBuffer& masters() const { return masters_; }
  StateBuffer& masters() { return masters_; }
  /// Replicas may exchange momentum in place of gradients: some of states() are not held by all of them.
  bool can_exchange_momentum() const;
  /// The part of the update range that this replica serves, of states that one replica holds
  /// (optim::OverReplicas): as many elements for each replica, a multiple of 64, as far as there are any.
  Range served() const;
  /// Gradients of the step under way are summed over the shard group alone, as replicas exchange momentum.
  void keep_own_gradients(bool own) { own_gradients_only_ = own; }
  bool keeps_own_gradients() const { return own_gradients_only_; }
  /// The ranks over which gradients of the step under way are summed.
  RankGroups gradient_groups() const;
  /// The optimizer's states beside the masters, by name.
  const std::vector<optim::State>& states() const { return states_; }
  /// The tensors of states(), of the update range, or of served(); filled with their initial values at first.
  const std::vector<StateBuffer>& moments() const { return moments_; }
  std::vector<StateBuffer>& moments() { return moments_; }
  /// The fp32 scales of a state in codes, for the blocks of flat elements [begin, end), where `begin` is that
  /// of a block. In memory always. Undefined for other states.
  Tensor scales(std::size_t state, std::int64_t begin, std::int64_t end) const;
  /// Elements of a state from flat element `begin` on, into or out of memory of the processor: in its dtype,
  /// or fp32 where it is kept in codes. Codes are written in whole blocks, but at the end of a parameter.
  void read_state(std::size_t state, std::int64_t begin, const Tensor& to) const;
  void write_state(std::size_t state, std::int64_t begin, const Tensor& from);

  Tensor own_parameters() const { return parameters_.range(stored(own_begin()), stored(own_end())); }
  Tensor own_gradients() const { return gradients_.range(own_begin(), own_end()); }

  /// The fp32 weights from flat element `begin` of the update range on, into memory of the processor.
  void read_masters(std::int64_t begin, const Tensor& to) const;
  /// The `count` elements that read_masters() and read_state() would give now, to be read later.
  Frozen freeze_masters(std::int64_t begin, std::int64_t count, FrozenMemory& memory) const;
  Frozen freeze_state(std::size_t state, std::int64_t begin, std::int64_t count, FrozenMemory& memory) const;
  /// Sets the weights from flat element `begin` on, out of any memory: compute parameters where this rank
  /// holds them, rounded as masters are, and masters in the update range. Where there are blocks, whole
  /// ones are written, but at the end of a parameter; throws Error{data} naming it where a value is not
  /// finite.
  void write_values(std::int64_t begin, const Tensor& from);
  /// Sets blocks of weights, the first of which begins with flat element `begin`.
  void write_blocks(std::int64_t begin, const Tensor& blocks) {
    parameters_.write(stored(begin), blocks).wait();
  }

  /// Points the parameters' values into `full` (a flat tensor of the padded segment), or clears them.
  void attach_values(const Tensor& full);
  void detach_values();
  /// Points the trainable parameters' gradients into `full`: of one source, or of all of them, one after the
  /// other. With `fold`, operations may fold their gradients, rounded to it, into the lasting ones; `onto`:
  /// onto the sum that these hold (autograd::GradientSum).
  void attach_gradients(const Tensor& full, std::optional<DType> fold = {}, bool onto = false);
  /// Zeroes gradients of pruned weights (Parameter::pruned), as far as operations have written any. The
  /// parameters' values are attached.
  void zero_pruned_gradients();
  /// Whether it has parameters of which some weights are pruned.
  bool has_pruned() const;
  /// Zeroes what no operation wrote, and clears the parameters' gradients. Returns the ranges whose gradients
  /// are where they were attached: all but those that operations have folded.
  std::vector<Range> close_gradients();
  /// Lasting gradients up to flat element `end`, on their way to where they stay.
  struct GradientArrival {
    std::int64_t end;
    device::Event event;
  };
  void gradients_arrive(std::vector<GradientArrival> arrivals) { arrivals_ = std::move(arrivals); }
  /// When lasting gradients up to flat element `end` are in their place, where they come on a stream of their
  /// own (GradientTraffic).
  device::Event gradients_arrived(std::int64_t end) const;

 private:
  StateBuffer make(const StateSources& sources, device::Category category, const Placement& placement,
                   Range range, bool shared, const char* kind);
  Range held(bool sharded) const {
    return sharded ? Range{own_begin(), own_end()} : Range{0, layout_.padded()};
  }
  void make_moments(const StateSources& sources, const Placement& placement);
  void draw_initial_values(std::uint64_t seed);
  void prune(std::int64_t begin, const Tensor& values) const;
  void keep_unpruned(std::int64_t begin, const Tensor& values, const Tensor& rounded) const;
  void write_in_blocks(std::int64_t begin, const Tensor& values);

  std::string name_;
  SegmentKey key_;
  SegmentLayout layout_;
  tensor::Kernels& kernels_;
  bool parameters_sharded_, folds_gradients_, gradients_staged_, optimizer_sharded_, gather_after_update_;
  MasterForm master_form_;
  DType compute_dtype_;
  std::int64_t own_begin_;
  StateBuffer parameters_, gradients_, masters_;
  std::vector<optim::State> states_;
  std::vector<StateBuffer> moments_;
  std::vector<Tensor> scales_;  ///< one for each block of the update range; undefined for states without
  std::vector<GradientArrival> arrivals_;
  bool own_gradients_only_ = false;
};

}  // namespace sherd::sharding

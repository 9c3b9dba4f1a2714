#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sharding/units/parameter_reader.h"
#include "sharding/units/residency_plan.h"
#include "sharding/units/unit.h"

namespace sherd::sharding {

/// Memory with which the ranks of one shard group exchange parameters and gradients. Used from the rank's
/// thread.
struct GroupMemory {
  comm::Communicator& group;
  ExchangePool pool;
  std::unique_ptr<ParameterReader> reader;  ///< null without parameters on NVMe
};

/// Counts of what residency did; for tests, reports and metrics. Reset by the reader.
struct ResidencyStats {
  std::int64_t gathers = 0;              ///< unit gathers, prefetched ones included
  std::int64_t prefetched = 0;           ///< gathers started before they were needed
  std::int64_t reused = 0;               ///< acquisitions served by a unit kept from before
  std::int64_t evicted = 0;              ///< kept units dropped for the live cap
  std::int64_t live = 0, peak_live = 0;  ///< gathered elements now and at most
  std::int64_t trace_breaks = 0;         ///< passes that left the recorded order
};

/// Decides when units are gathered and dropped: records the order of use in the first pass of each kind, then
/// follows the plan made from it (residency_plan.h). A pass that leaves the recorded order goes on without a
/// plan, and the next one records anew. Used from the rank's thread; all ranks run the same passes.
class Residency {
 public:
  enum class Mode : std::uint8_t { none, train, evaluate, list };

  Residency(device::Device& device, ResidencyLimits limits) : device_(device), limits_(limits) {}

  Unit& add_unit(std::string name, bool on_demand = false);
  /// After the last unit has its segments; collective. The buffers through which parameters come from
  /// `store`, for each shard group `buffers` of them, each for `elements` at most.
  void make_readers(offload::Store* store, int buffers, std::int64_t elements);
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  /// Exchange buffers of that group.
  ExchangePool& pool(comm::Communicator& group) { return memory_of(group).pool; }

  /// Starts a pass over the model (one micro-batch, forward and, when training, backward).
  void begin(Mode mode);
  /// Instead of begin(): a list of instructions follows, which says itself which units are gathered ahead and
  /// when they go. `order`: its gathers, by index of unit.
  void begin_list(const std::vector<int>& order);
  /// An instruction of a list: starts to gather the unit, unless it is there, or on its way.
  void gather_ahead(Unit& unit);
  /// Tells that a unit on demand is going to be leased, behind those announced before: its store begins to
  /// read it, and it is gathered while the one before is in use.
  void announce(Unit& unit);
  /// An instruction of a list: a unit on demand stays once it has been gathered, until this is taken back.
  void let_stay(Unit& unit, bool stays);
  /// Ends a pass that an exception left open: nothing is gathered or read ahead any more but what somebody
  /// leases.
  void abandon();
  /// Ends it: makes the plan after a recording pass, and drops whatever is still gathered and not leased.
  void end();

  // ---- parameters that are going to change, while passes may be under way ----
  /// Begins the changes of all units that train: none is gathered or read ahead before its own has ended.
  void begin_changes();
  /// Called where somebody takes a lease on a unit whose change has not ended; has to end it.
  void set_finish_changes(std::function<void()> finish) { finish_changes_ = std::move(finish); }
  /// Whether `segment` may change without anybody waiting for it: where its parameters are stored, a buffer
  /// waits for the new ones, so that the coming gather does not have to read them.
  bool may_change(const Segment& segment) const;
  /// Elements of the segment from `begin` on are `to`, and whoever reads them from where they are stored
  /// finds that; `last`: the whole segment has changed. Undefined: nothing is handed over.
  void changed(const Segment& segment, std::int64_t begin, const Tensor& to, bool last);
  /// The units may be gathered again; gathers that were to come ahead meanwhile begin.
  void end_changes(std::span<Unit* const> units);
  /// Whether any unit's change has not ended.
  bool changes() const;
  void abandon_changes() noexcept;
  /// Parameters, with `trained` those that train, have other values than before: scales with which they are
  /// gathered in FP8 are agreed on anew. At the same point on all ranks.
  void forget_scales(bool trained);

  ResidencyStats& stats() { return stats_; }

 private:
  friend class Unit;
  struct UseTrace {
    std::vector<UseEvent> events;
    std::vector<ResidencyStep> plan;  // empty until events are complete
    std::vector<int> order;           // of the gathers
    bool complete = false;
  };

  void acquired(Unit& unit, bool exact);
  void gather_announced(const Unit& leased);
  void released(Unit& unit);
  const ResidencyStep* advance(const UseEvent& event);
  void gather(Unit& unit, bool ahead, bool exact = false);
  void drop(Unit& unit);
  GroupMemory& memory_of(comm::Communicator& group);
  void forget_reads();
  Unit& unit_of(const Segment& segment) const;
  UseTrace& trace() { return traces_[mode_ == Mode::train ? 0 : 1]; }

  device::Device& device_;
  ResidencyLimits limits_;
  std::deque<GroupMemory> memories_;  ///< by shard group, in the order in which segments name them
  std::vector<std::unique_ptr<Unit>> units_;
  Mode mode_ = Mode::none;
  UseTrace traces_[2];
  std::size_t position_ = 0;
  bool following_ = false;
  std::vector<UseEvent> recorded_;
  std::function<void()> finish_changes_;
  std::vector<Unit*> put_off_;   ///< gathers ahead that wait for the end of changes
  bool exact_ = false;           ///< the last lease asked for exact parameters: so will those to come
  std::deque<Unit*> announced_;  ///< units on demand that are going to be leased
  ResidencyStats stats_;
};

}  // namespace sherd::sharding

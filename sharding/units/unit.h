#pragma once

// This folder decides when full parameters are in memory. Gather is a lease: Unit::gather() is the one door
// to full parameters, for forward, backward, recompute, export and user code. The last lease to go lets the
// unit be released, unless the plan keeps it. No lease may be held across a step.
//
// To change, look at:
// - when a unit is gathered, prefetched, kept and released: plan_residency(), residency_plan.cpp decides,
//   from the order of use that the first pass recorded; Residency (residency.cpp) does it
// - leases, the all-gather and its memory: unit.cpp
// - a unit on demand (an expert), which is in no plan: Residency::announce(); a block that a pass may leave
//   out is marked by nn::Module::mark_on_demand()
// - parameters that come from NVMe: parameter_reader.cpp, through offload/store.h; new ones that an update
//   hands over to the next forward: ParameterReader::hand_over(), Residency::begin_changes()
// - updated shards that become full parameters where these are replicated: publisher.cpp
// - weights that are gathered in FP8: fp8_weights.h
// - weights that do not train, as a save beside training reads them: frozen.h

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sharding/segment.h"
#include "sharding/units/fp8_weights.h"
#include "sharding/units/parameter_reader.h"

namespace sherd::sharding {

class Residency;
struct GroupMemory;

/// One block's parameters: the grain of gathering, of sending gradients off, and of recompute.
///
/// Whoever reads the full parameters holds a lease; the last lease to go lets them be released. Used from the
/// rank's thread.
class Unit {
 public:
  /// Keeps the unit's full parameters readable (Parameter::value) while it lives. Movable, not copyable.
  /// Taking the first lease on a sharded unit is a collective.
  class Lease {
   public:
    Lease() = default;
    Lease(Unit& unit, bool exact) : unit_(&unit) { unit.hold(exact); }
    Lease(Lease&& other) noexcept : unit_(std::exchange(other.unit_, nullptr)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(unit_, other.unit_);
      return *this;
    }
    ~Lease() {
      if (unit_) unit_->end_lease();
    }

   private:
    Unit* unit_ = nullptr;
  };

  Unit(int index, std::string name, Residency& residency, bool on_demand)
      : index_(index), name_(std::move(name)), residency_(residency), on_demand_(on_demand) {}

  int index() const { return index_; }
  const std::string& name() const { return name_; }
  std::vector<std::unique_ptr<Segment>>& segments() { return segments_; }
  const std::vector<std::unique_ptr<Segment>>& segments() const { return segments_; }
  /// Whether passes may leave the unit out (nn::Module::mark_on_demand()): no plan has it.
  bool on_demand() const { return on_demand_; }
  bool trainable() const;
  /// Whether weights that train are pruned (autograd::Parameter::pruned).
  bool has_pruned() const;
  /// Elements that a gather brings in; 0 when everything is resident anyway.
  std::int64_t gathered_elements() const;
  /// Segments whose parameters live on NVMe, of those sharded over `group`.
  std::vector<const Segment*> stored_segments(const comm::Communicator& group) const;

  /// The one door to the full parameters. `exact`: never those that were gathered in FP8; throws Error{usage}
  /// where somebody holds these.
  Lease gather(bool exact = false) { return {*this, exact}; }
  bool leased() const { return leases_ > 0; }
  /// Whether an update is going to change its parameters, or does so: nobody may gather them before its end,
  /// at the same point of the program on all ranks.
  bool outdated() const { return outdated_; }
  /// On this rank alone, for an outdated unit: whether none of its stored parameters has changed yet; whether
  /// all have, and their stores read the new ones.
  bool unchanged() const { return outdated_ && !touched_; }
  bool changed() const { return segments_to_change_ == 0; }

 private:
  friend class Residency;
  friend class Lease;
  enum class Presence : std::uint8_t { absent, under_way, resident };

  void hold(bool exact);
  void end_lease();
  bool in_fp8(std::size_t segment) const { return fp8_.size() > segment && fp8_[segment] && !exact_; }
  /// The values of a segment's shard, on the device.
  Tensor on_device(const Segment& segment, const Tensor& shard) const;
  void start_gather(std::deque<GroupMemory>& memories, bool async, bool exact);
  /// Waits until the gather no longer needs what was read for it.
  void settle();
  void finish_gather();
  void drop();
  void forget_scales(bool trained);

  int index_;
  std::string name_;
  Residency& residency_;
  bool on_demand_, stays_ = false;
  std::vector<std::unique_ptr<Segment>> segments_;
  int leases_ = 0;
  Presence presence_ = Presence::absent;
  bool outdated_ = false, touched_ = false;
  int segments_to_change_ = 0;
  bool exact_ = false;                            ///< what is gathered, or under way, is not in FP8
  std::vector<std::unique_ptr<Fp8Weights>> fp8_;  ///< by segment; null where it is not gathered so
  /// By segment; null where its parameters are not sharded.
  std::vector<std::shared_ptr<const Tensor>> gathered_;
  /// One group's part of a gather under way, and what was read for it.
  struct Gathering {
    ParameterReader::Staged staged;
    std::vector<std::shared_ptr<const Tensor>> codes;  ///< in FP8, of this rank's shards
    device::Event copied;                              ///< what was read for codes has left `staged`
    comm::Work work;
  };
  std::vector<Gathering> gathering_;
};

}  // namespace sherd::sharding

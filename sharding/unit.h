#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sharding/parameter_reader.h"
#include "sharding/residency.h"
#include "sharding/segment.h"

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
    explicit Lease(Unit& unit) : unit_(&unit) { unit.hold(); }
    Lease(Lease&& other) noexcept : unit_(std::exchange(other.unit_, nullptr)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(unit_, other.unit_);
      return *this;
    }
    ~Lease() {
      if (unit_) unit_->let_go();
    }

   private:
    Unit* unit_ = nullptr;
  };

  Unit(int index, std::string name, Residency& residency)
      : index_(index), name_(std::move(name)), residency_(residency) {}

  int index() const { return index_; }
  const std::string& name() const { return name_; }
  std::vector<std::unique_ptr<Segment>>& segments() { return segments_; }
  const std::vector<std::unique_ptr<Segment>>& segments() const { return segments_; }
  bool trainable() const;
  /// Elements that a gather brings in; 0 when everything is resident anyway.
  std::int64_t gathered_elements() const;
  /// Segments whose parameters live on NVMe, of those sharded over `group`.
  std::vector<const Segment*> stored_segments(const comm::Communicator& group) const;

  /// The one door to the full parameters.
  Lease gather() { return Lease(*this); }
  bool leased() const { return leases_ > 0; }

 private:
  friend class Residency;
  friend class Lease;
  enum class State : std::uint8_t { absent, under_way, resident };

  void hold();
  void let_go();
  void start_gather(std::deque<GroupMemory>& memories, bool async);
  /// Waits until the gather no longer needs what was read for it.
  void settle();
  void finish_gather();
  void drop();

  int index_;
  std::string name_;
  Residency& residency_;
  std::vector<std::unique_ptr<Segment>> segments_;
  int leases_ = 0;
  State state_ = State::absent;
  std::vector<std::shared_ptr<const Tensor>>
      gathered_;  ///< by segment; null where its parameters are not sharded
  /// One group's part of a gather under way, and what was read for it.
  struct Gathering {
    ParameterReader::Staged staged;
    comm::Work work;
  };
  std::vector<Gathering> gathering_;
};

/// What the ranks of one shard group exchange parameters and gradients with. Used from the rank's thread.
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
/// follows the plan made from it (residency.h). A pass that leaves the recorded order goes on without a plan,
/// and the next one records anew. Used from the rank's thread; all ranks run the same passes.
class Residency {
 public:
  enum class Pass : std::uint8_t { none, train, evaluate };

  Residency(device::Device& device, ResidencyLimits limits) : device_(device), limits_(limits) {}

  Unit& add_unit(std::string name);
  /// After the last unit has its segments; collective. The buffers through which parameters come from
  /// `store`, for each shard group `buffers` of them, each for `elements` at most.
  void make_readers(offload::Store* store, int buffers, std::int64_t elements);
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  /// Exchange buffers of that group.
  ExchangePool& pool(comm::Communicator& group) { return memory_of(group).pool; }

  /// Starts a pass over the model (one micro-batch, forward and, when training, backward).
  void begin(Pass pass);
  /// Ends a pass that an exception left open: nothing is gathered or read ahead any more but what somebody
  /// leases.
  void abandon();
  /// Ends it: makes the plan after a recording pass, and drops whatever is still gathered and not leased.
  void end();

  ResidencyStats& stats() { return stats_; }

 private:
  friend class Unit;
  struct Trace {
    std::vector<UseEvent> events;
    std::vector<ResidencyStep> plan;  // empty until events are complete
    std::vector<int> order;           // of the gathers
    bool complete = false;
  };

  void acquired(Unit& unit);
  void released(Unit& unit);
  const ResidencyStep* advance(const UseEvent& event);
  void gather(Unit& unit, bool ahead);
  void drop(Unit& unit);
  GroupMemory& memory_of(comm::Communicator& group);
  void forget_reads();
  Trace& trace() { return traces_[pass_ == Pass::train ? 0 : 1]; }

  device::Device& device_;
  ResidencyLimits limits_;
  std::deque<GroupMemory> memories_;  ///< by shard group, in the order in which segments name them
  std::vector<std::unique_ptr<Unit>> units_;
  Pass pass_ = Pass::none;
  Trace traces_[2];
  std::size_t position_ = 0;
  bool following_ = false;
  std::vector<UseEvent> recorded_;
  ResidencyStats stats_;
};

}  // namespace sherd::sharding

#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/grid.h"

namespace sherd::comm {

/// A grid's groups of which one rank is a member, each made once: axes with the same ranks share a
/// communicator, and one with all ranks is the world itself. Groups of one rank exchange nothing, here as
/// later.
class ProcessGroups {
 public:
  /// Collective: all ranks of the world give the same grid, of as many ranks as the world has (else
  /// Error{usage}). The world, borrowed, must outlive it. `others_exist`: false in a dry world, of whose
  /// perhaps millions of ranks only the members of this one's groups are looked at then.
  ProcessGroups(Communicator& world, const Grid& grid, bool others_exist = true);

  const Grid& grid() const { return grid_; }
  Communicator& world() const { return group(Axis::world); }
  Communicator& group(Axis axis) const { return *groups_[static_cast<std::size_t>(axis)]; }

  /// Collective: the group of Grid::replicas_on(), made on the first call for these stages (ascending, at
  /// least one); null on other stages. What it carries is told under Axis::pipeline.
  Communicator* replicas_on(const std::vector<int>& stages);

  /// Collective over the axis's group: a further communicator of its ranks, split from it, whose calls wait
  /// for no others. What it carries is told under `axis`.
  Communicator& another(Axis axis);

  /// Collective over the axis's group: the communicator that another() makes at the first call, which is
  /// given back at later ones. Layers exchange by it in the middle of a pass without waiting for transfers
  /// that passes have under way.
  Communicator& apart(Axis axis);

  /// Collective: Communicator::bind() of all groups.
  void bind(const std::shared_ptr<device::Device>& device);

  /// The bytes that communicators of several ranks carried, each told once, under the first of its axes in
  /// the order of Axis.
  struct AxisTraffic {
    Axis axis;
    Traffic traffic;
  };
  std::vector<AxisTraffic> traffic() const;
  /// The host memory of all groups together, as comm::host_memory() says, with so many ranks on each
  /// machine.
  std::uint64_t host_memory(int ranks_of_machine) const;
  void reset_traffic();

 private:
  /// Calls visit(first axis, communicator) for each communicator of an axis once.
  template <class Visit>
  void for_each_axis(const Visit& visit) const;
  /// The same, and for those of replicas_on() and another().
  template <class Visit>
  void for_each_group(const Visit& visit) const;

  Grid grid_;
  std::vector<std::unique_ptr<Communicator>> made_;
  std::array<Communicator*, axis_count> groups_{};
  bool others_exist_;
  std::map<std::vector<int>, Communicator*> on_stages_;  ///< by stages
  std::vector<std::pair<Axis, Communicator*>> further_;  ///< made by another()
  std::map<Axis, Communicator*> apart_;                  ///< the one that apart() gives, by axis
};

}  // namespace sherd::comm

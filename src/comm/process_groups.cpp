#include "comm/process_groups.h"

#include <algorithm>

#include "base/error.h"
#include "comm/host_memory.h"

namespace sherd::comm {

ProcessGroups::ProcessGroups(Communicator& world, const Grid& grid, bool others_exist) : grid_(grid) {
  require(grid.ranks() == world.size(), "a grid of ", grid.ranks(), " ranks over ", world.name());
  groups_.back() = &world;
  for (std::size_t axis = 0; axis + 1 < groups_.size(); ++axis) {
    const auto here = static_cast<Axis>(axis);
    // Same groups are the same on all ranks, so all make them in the same order.
    for (std::size_t other = groups_.size(); other-- > 0 && !groups_[axis];)
      if (groups_[other] && grid.same_groups(static_cast<Axis>(other), here)) groups_[axis] = groups_[other];
    if (groups_[axis]) continue;
    // Alone, a rank need not know the others' places, of which a world may have millions.
    made_.push_back(grid.size(here) == 1 || !others_exist ? world.part({grid.members(here, world.rank())})
                                                          : world.part(grid.partition(here)));
    groups_[axis] = made_.back().get();
  }
}

template <class Visit>
void ProcessGroups::for_each_group(const Visit& visit) const {
  for (std::size_t axis = 0; axis < groups_.size(); ++axis) {
    const auto end = groups_.begin() + static_cast<std::ptrdiff_t>(axis);
    if (std::find(groups_.begin(), end, groups_[axis]) == end) visit(static_cast<Axis>(axis), *groups_[axis]);
  }
}

void ProcessGroups::bind(const std::shared_ptr<device::Device>& device) {
  for_each_group([&](Axis, Communicator& group) { group.bind(device); });
}

std::vector<ProcessGroups::AxisTraffic> ProcessGroups::traffic() const {
  std::vector<AxisTraffic> out;
  for_each_group([&](Axis axis, const Communicator& group) {
    if (group.size() > 1) out.push_back({axis, group.traffic()});
  });
  return out;
}

std::uint64_t ProcessGroups::host_memory(int ranks_of_machine) const {
  std::uint64_t total = 0;
  for_each_group([&](Axis axis, const Communicator& group) {
    total += comm::host_memory(group.size(), grid_.size_on_machine(axis, world().rank(), ranks_of_machine));
  });
  return total;
}

void ProcessGroups::reset_traffic() {
  for_each_group([](Axis, Communicator& group) { group.reset_traffic(); });
}

}  // namespace sherd::comm

#include "comm/process_groups.h"

#include <algorithm>

#include "base/error.h"

namespace sherd::comm {

ProcessGroups::ProcessGroups(Communicator& world, const Grid& grid) : grid_(grid) {
  require(grid.ranks() == world.size(), "a grid of ", grid.ranks(), " ranks over ", world.name());
  groups_.back() = &world;
  for (std::size_t axis = 0; axis + 1 < groups_.size(); ++axis) {
    const auto parts = grid.partition(static_cast<Axis>(axis));
    // Equal partitions are equal on all ranks, so all make the same groups in the same order.
    for (std::size_t other = groups_.size(); other-- > 0 && !groups_[axis];)
      if (groups_[other] && grid.partition(static_cast<Axis>(other)) == parts) groups_[axis] = groups_[other];
    if (groups_[axis]) continue;
    made_.push_back(world.part(parts));
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

void ProcessGroups::reset_traffic() {
  for_each_group([](Axis, Communicator& group) { group.reset_traffic(); });
}

}  // namespace sherd::comm

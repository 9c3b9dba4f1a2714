#include "comm/process_groups.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "comm/memory.h"

namespace sherd::comm {

ProcessGroups::ProcessGroups(Communicator& world, const Grid& grid, bool others_exist)
    : grid_(grid), others_exist_(others_exist) {
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
  for_each_axis([&](Axis, Communicator& group) {
    std::string purpose;
    for (std::size_t axis = 0; axis < groups_.size(); ++axis)
      if (groups_[axis] == &group)
        purpose += cat(purpose.empty() ? "" : ", ", name_of(static_cast<Axis>(axis)));
    group.set_purpose(purpose);
  });
}

template <class Visit>
void ProcessGroups::for_each_axis(const Visit& visit) const {
  for (std::size_t axis = 0; axis < groups_.size(); ++axis) {
    const auto end = groups_.begin() + static_cast<std::ptrdiff_t>(axis);
    if (std::find(groups_.begin(), end, groups_[axis]) == end) visit(static_cast<Axis>(axis), *groups_[axis]);
  }
}

template <class Visit>
void ProcessGroups::for_each_group(const Visit& visit) const {
  for_each_axis(visit);
  for (const auto& [stages, group] : on_stages_)
    if (group) visit(Axis::pipeline, *group);
  for (const auto& [axis, group] : further_) visit(axis, *group);
}

Communicator& ProcessGroups::another(Axis axis) {
  std::vector<int> all(static_cast<std::size_t>(group(axis).size()));
  std::iota(all.begin(), all.end(), 0);
  made_.push_back(group(axis).part({all}));
  further_.emplace_back(axis, made_.back().get());
  made_.back()->set_purpose(cat(name_of(axis), ", further"));
  return *made_.back();
}

Communicator& ProcessGroups::apart(Axis axis) {
  const auto known = apart_.find(axis);
  return known == apart_.end() ? *(apart_[axis] = &another(axis)) : *known->second;
}

Communicator* ProcessGroups::replicas_on(const std::vector<int>& stages) {
  require(!stages.empty() && std::is_sorted(stages.begin(), stages.end()), "stages are given in order");
  const auto [known, first] = on_stages_.emplace(stages, nullptr);
  if (!first) return known->second;
  const int own = grid_.coordinate(Axis::pipeline, world().rank());
  const bool here = std::find(stages.begin(), stages.end(), own) != stages.end();
  if (others_exist_)
    made_.push_back(world().part(grid_.partition_on(stages)));
  else if (here)
    made_.push_back(world().part({grid_.replicas_on(stages, world().rank())}));
  if (!here) return nullptr;
  known->second = made_.back().get();
  known->second->set_purpose("replicas of what several stages hold");
  return known->second;
}

void ProcessGroups::bind(const std::shared_ptr<device::Device>& device) {
  for_each_group([&](Axis, Communicator& group) { group.bind(device); });
}

std::vector<ProcessGroups::AxisTraffic> ProcessGroups::traffic() const {
  std::vector<AxisTraffic> out;
  for_each_group([&](Axis axis, const Communicator& group) {
    if (group.size() == 1) return;
    const auto same =
        std::find_if(out.begin(), out.end(), [&](const auto& told) { return told.axis == axis; });
    if (same == out.end())
      out.push_back({axis, group.traffic()});
    else
      same->traffic.add(group.traffic());
  });
  return out;
}

std::uint64_t ProcessGroups::host_memory(int ranks_of_machine) const {
  std::uint64_t total = 0;
  const int rank = world().rank();
  for_each_axis([&](Axis axis, const Communicator& group) {
    total += comm::host_memory(group.size(), grid_.size_on_machine(axis, rank, ranks_of_machine));
  });
  for (const auto& [axis, group] : further_)
    total += comm::host_memory(group->size(), grid_.size_on_machine(axis, rank, ranks_of_machine));
  for (const auto& [stages, group] : on_stages_) {
    if (!group) continue;
    const std::vector<int> ranks = grid_.replicas_on(stages, rank);
    const auto here = std::count_if(ranks.begin(), ranks.end(), [&](int other) {
      return other / ranks_of_machine == rank / ranks_of_machine;
    });
    total += comm::host_memory(group->size(), static_cast<int>(here));
  }
  return total;
}

void ProcessGroups::reset_traffic() {
  for_each_group([](Axis, Communicator& group) { group.reset_traffic(); });
}

}  // namespace sherd::comm

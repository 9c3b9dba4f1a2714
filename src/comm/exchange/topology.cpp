#include "comm/exchange/topology.h"

#include <map>
#include <numeric>

namespace sherd::comm {

Topology::Topology(int rank, const std::vector<std::uint64_t>& machine_of) : rank_(rank) {
  std::map<std::uint64_t, int> numbers;
  for (int r = 0; r < static_cast<int>(machine_of.size()); ++r) {
    const auto next = static_cast<int>(numbers.size());
    const int machine = numbers.try_emplace(machine_of[static_cast<std::size_t>(r)], next).first->second;
    if (machine == next) ranks_on_.emplace_back();
    auto& ranks = ranks_on_[static_cast<std::size_t>(machine)];
    local_index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(r);
    machine_of_.push_back(machine);
    if (segments_.empty() || segments_.back().machine != machine) segments_.push_back({machine, r, r});
    segments_.back().end = r + 1;
  }
}

Topology Topology::one_machine(int rank, int size) {
  return {rank, std::vector<std::uint64_t>(static_cast<std::size_t>(size))};
}

Topology Topology::apart(int rank, int size) {
  std::vector<std::uint64_t> machines(static_cast<std::size_t>(size));
  std::iota(machines.begin(), machines.end(), std::uint64_t{0});
  return {rank, machines};
}

int Topology::deputy(int machine, int rank) const {
  if (machine_of(rank) == machine) return rank;
  const auto& ranks = ranks_on(machine);
  return ranks[static_cast<std::size_t>(local_index(rank)) % ranks.size()];
}

}  // namespace sherd::comm

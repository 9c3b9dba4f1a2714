#pragma once

#include <cstdint>
#include <vector>

namespace sherd::comm {

/// Which ranks of a group share the memory of a machine. The same on all ranks but for rank().
class Topology {
 public:
  /// Ranks [begin, end) that follow each other on one machine.
  struct LocalRanks {
    int machine = 0, begin = 0, end = 0;
  };

  /// `machine_of[r]` is the same number for ranks that share memory.
  Topology(int rank, const std::vector<std::uint64_t>& machine_of);
  static Topology one_machine(int rank, int size);
  /// Every rank by itself.
  static Topology apart(int rank, int size);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(machine_of_.size()); }
  /// Machines are numbered by their first ranks.
  int machines() const { return static_cast<int>(ranks_on_.size()); }
  int machine_of(int rank) const { return machine_of_[static_cast<std::size_t>(rank)]; }
  int machine() const { return machine_of(rank_); }
  const std::vector<int>& ranks_on(int machine) const { return ranks_on_[static_cast<std::size_t>(machine)]; }
  /// The ranks of this machine, in their order.
  const std::vector<int>& locals() const { return ranks_on(machine()); }
  bool is_local(int rank) const { return machine_of(rank) == machine(); }
  /// The place of a rank among those of its machine.
  int local_index(int rank) const { return local_index_[static_cast<std::size_t>(rank)]; }
  /// The first rank of this machine, which speaks for it.
  bool is_leader() const { return locals().front() == rank_; }
  /// The leaders before and after this machine's, round the machines.
  int previous_leader() const { return ranks_on((machine() + machines() - 1) % machines()).front(); }
  int next_leader() const { return ranks_on((machine() + 1) % machines()).front(); }
  /// The rank on `machine` that acts for `rank`: itself where it is there, else one of the machine's ranks,
  /// in turn.
  int deputy(int machine, int rank) const;
  /// All ranks, in rank order.
  const std::vector<LocalRanks>& segments() const { return segments_; }

 private:
  int rank_;
  std::vector<int> machine_of_, local_index_;
  std::vector<std::vector<int>> ranks_on_;
  std::vector<LocalRanks> segments_;
};

}  // namespace sherd::comm

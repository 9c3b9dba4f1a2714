#pragma once

#include <string>
#include <vector>

#include "comm/messages/port.h"

namespace sherd::comm {

/// Where a process runs, so that others on the machine can see whether it still does. Plain bytes: it travels
/// in messages.
struct RankIdentity {
  unsigned long long host = 0;     ///< hash of the boot and the name
  long long pid = 0, started = 0;  ///< from /proc/PID/stat
  unsigned long cpus[16] = {};     ///< it may run on
};
/// `machine`: a name for the machine, empty for the system's own (CommOptions::machine).
RankIdentity own_identity(const std::string& machine = "");
/// True when that process, on this machine, is running (not a zombie), and when this cannot be told (no
/// descriptor to spare, say): a wait's deadline then ends what a dead process would have.
bool running(const RankIdentity& identity);
/// Sets the pid of processes of this machine that cannot be watched from here (of another process namespace)
/// to 0.
void hide_unseen(std::vector<RankIdentity>& world, const RankIdentity& mine);

/// The knowledge of a group's rank about the others from their identities.
class Neighbours {
 public:
  /// `world` by world rank; the group has `world_ranks`, and `rank` is this process's place among them.
  Neighbours(const std::vector<RankIdentity>& world, const std::vector<int>& world_ranks, int rank);
  /// More ranks of the world on this machine than cores that they may use.
  bool crowded() const { return crowded_; }
  /// The process of `rank` has ended. Known on this machine only; elsewhere false.
  bool gone(int rank) const;
  /// This process's place among the group's of its machine.
  LocalPlace place() const { return place_; }

 private:
  static bool is_crowded(const std::vector<RankIdentity>& world, unsigned long long host);
  bool crowded_ = false;
  LocalPlace place_{0, 0};
  std::vector<RankIdentity> peers_;  ///< pid 0: cannot be watched
};

}  // namespace sherd::comm

#include "comm/processes/identity.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/files.h"
#include "base/random.h"

namespace sherd::comm {
namespace {

struct ProcessState {
  char state = 0;  ///< 0: no such process; '?': cannot be told
  long long started = 0;
};

/// Reads /proc by plain calls, for a process may end between open and read, and only their error tells that
/// from a lack of descriptors here.
ProcessState look_up(long long pid) {
  char text[1024];
  const FileDescriptor file(::open(cat("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  const ssize_t size = file ? ::read(file.get(), text, sizeof text) : -1;
  const bool no_process = size < 0 && (errno == ENOENT || errno == ESRCH);
  if (size <= 0) return {.state = no_process ? '\0' : '?'};
  // The name, in parentheses, may hold anything: fields are counted from the last one closed.
  const std::string_view stat(text, static_cast<std::size_t>(size));
  std::istringstream fields{std::string(stat.substr(stat.rfind(')') + 1))};
  ProcessState out;
  fields >> out.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> out.started;
  return out;
}

}  // namespace

RankIdentity own_identity(const std::string& machine) {
  RankIdentity out;
  std::ifstream boot_file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(boot_file, boot);
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  out.host = machine.empty() ? stable_hash(boot + name) : stable_hash("machine " + machine);
  out.pid = getpid();
  out.started = look_up(out.pid).started;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    std::memcpy(out.cpus, &set, std::min(sizeof out.cpus, sizeof set));
  return out;
}

bool running(const RankIdentity& identity) {
  const ProcessState now = look_up(identity.pid);
  if (now.state == '?') return true;
  return now.state != 0 && now.state != 'Z' && now.state != 'X' && now.started == identity.started;
}

Neighbours::Neighbours(const std::vector<RankIdentity>& world, const std::vector<int>& world_ranks,
                       int rank) {
  const RankIdentity mine = world[static_cast<std::size_t>(world_ranks[static_cast<std::size_t>(rank)])];
  for (std::size_t r = 0; r < world_ranks.size(); ++r) {
    RankIdentity peer = world[static_cast<std::size_t>(world_ranks[r])];
    if (peer.host != mine.host) {
      peer.pid = 0;
    } else {
      place_.rank += r < static_cast<std::size_t>(rank);
      ++place_.size;
    }
    peers_.push_back(peer);
  }
  crowded_ = is_crowded(world, mine.host);
}

bool Neighbours::gone(int rank) const {
  const RankIdentity& peer = peers_[static_cast<std::size_t>(rank)];
  return peer.pid != 0 && !running(peer);
}

bool Neighbours::is_crowded(const std::vector<RankIdentity>& world, unsigned long long host) {
  unsigned long cpus[std::size(RankIdentity{}.cpus)] = {};
  int ranks = 0, cores = 0;
  for (const RankIdentity& identity : world) {
    if (identity.host != host) continue;
    ++ranks;
    for (std::size_t i = 0; i < std::size(cpus); ++i) cpus[i] |= identity.cpus[i];
  }
  for (const unsigned long word : cpus) cores += std::popcount(word);
  return ranks > cores;
}

void hide_unseen(std::vector<RankIdentity>& world, const RankIdentity& mine) {
  for (RankIdentity& peer : world)
    if (peer.host == mine.host && !running(peer)) peer.pid = 0;
}

}  // namespace sherd::comm

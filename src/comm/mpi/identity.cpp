#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "base/random.h"
#include "comm/mpi/runtime.h"

namespace sherd::comm::mpi {
namespace {

struct ProcessState {
  char state = 0;  ///< 0: no such process
  long long started = 0;
};

ProcessState look_up(long long pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The name, in parentheses, may hold anything: fields are counted from the last one closed.
  const std::size_t close = text.rfind(')');
  if (close == std::string::npos) return {};
  std::istringstream fields(text.substr(close + 1));
  ProcessState out;
  fields >> out.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> out.started;
  return out;
}

}  // namespace

Identity own_identity() {
  Identity out;
  std::ifstream boot_file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(boot_file, boot);
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  out.host = stable_hash(boot + name);
  out.pid = getpid();
  out.started = look_up(out.pid).started;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    std::memcpy(out.cpus, &set, std::min(sizeof out.cpus, sizeof set));
  return out;
}

bool running(const Identity& identity) {
  const ProcessState now = look_up(identity.pid);
  return now.state != 0 && now.state != 'Z' && now.state != 'X' && now.started == identity.started;
}

}  // namespace sherd::comm::mpi

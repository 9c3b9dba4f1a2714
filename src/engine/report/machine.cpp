#include "engine/report/machine.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "config/config.h"

namespace sherd::engine {

std::string io_uring_state() {
#if defined(SYS_io_uring_setup)
  std::array<std::uint32_t, 30> parameters{};  // struct io_uring_params, all zero: 120 bytes
  const long ring = ::syscall(SYS_io_uring_setup, 1, parameters.data());
  if (ring >= 0) {
    ::close(static_cast<int>(ring));
    return "available";
  }
  switch (errno) {
    case ENOSYS:
      return "not in this kernel";
    case EPERM:
      return "forbidden here (kernel.io_uring_disabled, or a container's seccomp profile)";
    case ENOMEM:
      return "refused: locked-memory limit (ulimit -l)";
    default:
      return cat("refused: ", std::strerror(errno));
  }
#else
  return "unknown to the headers Sherd was built with";
#endif
}

MemorySizes memory_sizes() {
  MemorySizes sizes;
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  for (std::uint64_t kib = 0; in >> key >> kib; std::getline(in, unit)) {
    if (key == "MemTotal:") sizes.total = kib * 1024;
    if (key == "MemAvailable:") sizes.available = kib * 1024;
    if (key == "SwapFree:") sizes.swap = kib * 1024;
  }
  if (const char* told = std::getenv("SHERD_MACHINE_MEMORY")) {
    const auto bytes = config::bytes_of(told);
    if (!bytes || *bytes == 0)
      fail(ErrorKind::usage, "SHERD_MACHINE_MEMORY must be a size such as \"128GB\", not '", told, "'");
    sizes.total = sizes.available = *bytes, sizes.swap = 0;
  }
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::uint64_t limit = 0;
    if (std::ifstream(file) >> limit && limit < sizes.total) sizes.limit = limit;  // "max" is not a number
  }
  return sizes;
}

bool memory_may_grow() {
  namespace fs = std::filesystem;
  for (const char* driver :
       {"/sys/bus/virtio/drivers/virtio_balloon", "/sys/bus/virtio/drivers/virtio_mem"}) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(driver, ignored))
      if (entry.is_symlink(ignored)) return true;  // a device of it
  }
  return false;
}

ProcessorTimes processor_times() {
  ProcessorTimes times;
  std::ifstream in("/proc/stat");
  std::string cpu;
  // user nice system idle iowait irq softirq steal
  std::array<double, 8> ticks{};
  in >> cpu;
  for (double& part : ticks) in >> part;
  const double per_second = static_cast<double>(::sysconf(_SC_CLK_TCK));
  if (!in || cpu != "cpu" || per_second <= 0) return {};
  for (const double part : ticks) times.all += part / per_second;
  times.busy = times.all - (ticks[3] + ticks[4]) / per_second;
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  for (const timeval& part : {use.ru_utime, use.ru_stime})
    times.own += static_cast<double>(part.tv_sec) + 1e-6 * static_cast<double>(part.tv_usec);
  return times;
}

double share_of_others(const ProcessorTimes& from, const ProcessorTimes& to) {
  const double all = to.all - from.all, others = (to.busy - from.busy) - (to.own - from.own);
  return all > 0 ? std::clamp(others / all, 0.0, 1.0) : 0;
}

}  // namespace sherd::engine

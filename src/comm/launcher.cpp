#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "comm/processes/process_group.h"
#include "comm/tcp/tcp_world.h"

namespace sherd::comm {
namespace {

const char* from_environment(const char* name) {
  return std::getenv(name);
}

/// The first of these variables that is a number, else `otherwise`.
int number_in(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names) {
    const char* text = std::getenv(name);
    if (!text) continue;
    const std::string_view all = text;
    int value = 0;
    const auto [end, error] = std::from_chars(all.begin(), all.end(), value);
    if (error == std::errc() && end == all.end() && value >= 0) return value;
  }
  return otherwise;
}

LaunchEnvironment environment() {
  const auto launch = read_launch_environment();
  require(launch.has_value(), "no launcher started this process: neither RANK nor WORLD_SIZE is set");
  return *launch;
}

}  // namespace

Launcher launcher() {
  return find_launcher(from_environment, mpi_available());
}

int launched_ranks() {
  switch (launcher()) {
    case Launcher::none:
      return 1;
    case Launcher::mpi:
      return number_in({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, 0);
    case Launcher::environment:
      return environment().world_size;
  }
  return 0;
}

LaunchedWorld join_launched_world(const CommOptions& options) {
  if (launcher() == Launcher::mpi) {
    LaunchedWorld out = join_mpi_world(options);
    // The launcher knows better where every rank has a container of its own.
    out.local_rank =
        number_in({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"}, out.local_rank);
    out.local_size =
        number_in({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}, out.local_size);
    out.local_size = std::max(out.local_size, out.local_rank + 1);
    return out;
  }
  const LaunchEnvironment launch = environment();
  LaunchedWorld out;
  if (launch.world_size == 1)
    out.world = make_self(options);
  else
    out = join_tcp_world(launch, options);
  if (launch.local_rank >= 0) out.local_rank = launch.local_rank;
  if (launch.local_world_size > 0) out.local_size = launch.local_world_size;
  out.local_size = std::max(out.local_size, out.local_rank + 1);
  return out;
}

}  // namespace sherd::comm

#include <algorithm>
#include <cstdlib>

#include "base/text/excerpt.h"
#include "comm/processes/process_group.h"
#include "comm/tcp/socket_port.h"

namespace sherd::comm {
namespace {

const char* from_environment(const char* name) {
  return std::getenv(name);
}

/// The first of these variables that is a number, else `otherwise`.
int number_in(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names)
    if (const int value = whole_number(from_environment, name); value >= 0) return value;
  return otherwise;
}

/// "A and B".
std::string listed(const std::vector<std::pair<std::string, std::string>>& variables) {
  std::string out;
  for (std::size_t i = 0; i < variables.size(); ++i)
    out += cat(i == 0 ? "" : i + 1 == variables.size() ? " and " : ", ", variables[i].first);
  return out;
}

/// `found`: ranks of MPI's world, 0 where this build cannot ask.
[[noreturn]] void refuse_separate(const ProcessLauncher& by, int found) {
  const std::string seen = joined_text(
      by.variables, ", ", [](const auto& variable) { return cat(variable.first, '=', variable.second); });
  const std::string names = listed(by.variables);
  fail(ErrorKind::usage, by.name, " started this process as one of ",
       by.ranks > 0 ? counted(by.ranks, "rank") : "several", " (", seen, "), but ",
       found > 0 && by.name == open_mpi
           ? cat("the OpenMPI that this build links finds ", found,
                 ", as with the mpirun of another installation, or with variables that an earlier one left")
       : found > 0 ? cat("this build's MPI, which is another, finds ", found)
       : !by.mpi   ? "nothing tells them where to meet"
                   : "this build has no MPI",
       ": each would train by itself. Start them with ",
       !mpi_available()      ? "a build that has MPI (-DSHERD_WITH_MPI=ON) and OpenMPI's mpirun"
       : by.name == open_mpi ? "the mpirun that belongs to it (ldd shows which libmpi that is)"
                             : "OpenMPI's mpirun",
       ", or with torchrun --no-python",
       by.mpi ? cat(", or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each and unset ", names)
              : cat(", or export MASTER_ADDR and MASTER_PORT and put srun sh -c 'RANK=$SLURM_PROCID "
                    "WORLD_SIZE=$SLURM_NTASKS exec \"$@\"' sh before the command"),
       "; to train in this process alone, unset ", names);
}

ProcessLauncher process_launcher() {
  const auto by = find_process_launcher(from_environment);
  require(by.has_value(), "no launcher of processes started this one");
  return *by;
}

LaunchEnvironment environment() {
  const auto launch = read_launch_environment(from_environment);
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
      return process_launcher().ranks;
    case Launcher::environment:
      return environment().world_size;
    case Launcher::separate:
      refuse_separate(process_launcher(), 0);
  }
  return 0;
}

int restarts() {
  return number_in({"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"}, 0);
}

std::unique_ptr<Communicator> make_mpi_world(const CommOptions& options) {
  return join_mpi_world(options).world;
}

LaunchedWorld join_launched_world(const CommOptions& options) {
  const Launcher kind = launcher();
  if (kind == Launcher::separate) refuse_separate(process_launcher(), 0);
  if (kind == Launcher::mpi) {
    const ProcessLauncher by = process_launcher();
    LaunchedWorld out = join_mpi_world(options);
    if (const int found = out.world->size(); found < by.ranks || found <= by.rank) refuse_separate(by, found);
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

#include "comm/tcp/launch_environment.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/error.h"

namespace sherd::comm {
namespace {

bool is_set(const GetVariable& get, const char* name) {
  const char* value = get(name);
  return value && *value;
}

std::string value_of(const GetVariable& get, const char* name) {
  if (!is_set(get, name))
    fail(ErrorKind::usage,
         "the environment's RANK or WORLD_SIZE says that a launcher started this process, but ", name,
         " is not set: a launcher like torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; unset "
         "them all to run without one");
  return get(name);
}

int number_of(const GetVariable& get, const char* name, int least, int most) {
  const std::string text = value_of(get, name);
  const int value = whole_number(get, name);
  if (value < least || value > most)
    fail(ErrorKind::usage, "the environment's ", name, " must be a whole number of ", least, " to ", most,
         ", not '", text, "'");
  return value;
}

}  // namespace

int whole_number(const GetVariable& get, const char* name) {
  if (!is_set(get, name)) return -1;
  const std::string_view text = get(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 ? value : -1;
}

std::string first_host(const std::string& list) {
  std::string host;
  std::size_t at = 0;
  while (at < list.size() && list[at] != ',') {
    if (list[at] != '[') {
      host += list[at++];
      continue;
    }
    const std::size_t end = list.find(']', at);
    const std::string_view inside = std::string_view(list).substr(at + 1, end - at - 1);
    const std::string_view first = inside.substr(0, inside.find_first_of(",-"));
    if (end == std::string::npos || first.empty()) break;
    host += first, at = end + 1;
  }
  if (host.empty() || (at < list.size() && list[at] != ','))
    fail(ErrorKind::usage, "the list of nodes '", list, "' begins with no host");
  return host;
}

namespace {

constexpr int most_ranks = 1 << 20, last_port = 65535;
constexpr const char *pmi_rank = "PMI_RANK", *pmi_size = "PMI_SIZE", *pmix_rank = "PMIX_RANK";
// Not SLURM_NTASKS: a batch script has it, too, of which there is one process.
constexpr const char *slurm_rank = "SLURM_PROCID", *step_tasks = "SLURM_STEP_NUM_TASKS",
                     *step_nodes = "SLURM_STEP_NODELIST";

/// How launchers number the processes they start.
struct Convention {
  const char *launcher, *rank, *ranks;  ///< "": it has no variable for that
  bool mpi;
};
constexpr Convention conventions[] = {
    {open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", true},
    {"MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", true},
    {"MPICH's mpiexec or another launcher that speaks PMI", pmi_rank, pmi_size, true},
    {"a launcher that speaks PMIx", pmix_rank, "", true},
    {"Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", true},
    {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", true},
    {"PALS' mpiexec", "PALS_RANKID", "", true},
    {"srun", slurm_rank, "", false}};

/// A batch script, and the shell that an allocation opens, are task 0 of one.
bool started_by(const Convention& launcher, const GetVariable& get) {
  if (launcher.mpi) return is_set(get, launcher.rank) || is_set(get, launcher.ranks);
  return whole_number(get, launcher.rank) > 0 || whole_number(get, step_tasks) > 1;
}

/// Whether srun itself numbers this process: no launcher within the step does, and MPI's ranks are PMIx's.
bool is_task_of_srun(const GetVariable& get) {
  if (whole_number(get, step_tasks) <= 1 || !is_set(get, step_nodes)) return false;
  const int rank = whole_number(get, slurm_rank);
  // srun's own PMI numbers tasks as it does, and OpenMPI does not speak it.
  const bool own_pmi =
      whole_number(get, pmi_rank) == rank && whole_number(get, pmi_size) == whole_number(get, step_tasks);
  for (const Convention& other : conventions) {
    const std::string_view variable = other.rank;
    if (!other.mpi || variable == pmix_rank || (variable == pmi_rank && own_pmi)) continue;
    if (started_by(other, get)) return false;
  }
  return rank >= 0;
}

/// The tasks on a step's `node`-th node, by a list such as "4(x2),3"; 0 where it does not say.
int tasks_on(const std::string& list, int node) {
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    int tasks = 0, times = 1;
    const auto* past = std::from_chars(list.data() + at, list.data() + end, tasks).ptr;
    if (end - static_cast<std::size_t>(past - list.data()) > 2 && *past == '(')
      std::from_chars(past + 2, list.data() + end, times);
    if ((node -= times) < 0) return tasks;
    at = end + 1;
  }
  return 0;
}

/// Ports that neither services nor the system's own choice (32768 and up) take. Neighbouring jobs, and their
/// steps, have others: they may run at once on one machine.
int port_of_step(const GetVariable& get) {
  constexpr int first = 15000, jobs = 937, steps = 16;
  int reserved = 0;
  if (const std::string_view ports_of =
          is_set(get, "SLURM_STEP_RESV_PORTS") ? get("SLURM_STEP_RESV_PORTS") : "";
      !ports_of.empty())  // "12000-12003" of srun --resv-ports
    std::from_chars(ports_of.data(), ports_of.data() + ports_of.size(), reserved);
  if (reserved > 0) return reserved;
  const int job = std::max(0, whole_number(get, "SLURM_JOB_ID")),
            number = std::max(0, whole_number(get, "SLURM_STEP_ID"));
  return first + job % jobs * steps + number % steps;
}

LaunchEnvironment read_task_of_srun(const GetVariable& get) {
  LaunchEnvironment out;
  out.world_size = number_of(get, step_tasks, 1, most_ranks);
  out.rank = number_of(get, slurm_rank, 0, out.world_size - 1);
  out.local_rank = whole_number(get, "SLURM_LOCALID");
  if (const int node = whole_number(get, "SLURM_NODEID");
      node >= 0 && is_set(get, "SLURM_STEP_TASKS_PER_NODE"))
    out.local_world_size = tasks_on(get("SLURM_STEP_TASKS_PER_NODE"), node);
  out.master_address = is_set(get, "MASTER_ADDR") ? get("MASTER_ADDR") : first_host(get(step_nodes));
  out.master_port =
      is_set(get, "MASTER_PORT") ? number_of(get, "MASTER_PORT", 1, last_port) : port_of_step(get);
  // A job that was requeued begins again under its number.
  for (const char* name : {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"})
    if (is_set(get, name)) out.run += cat(out.run.empty() ? "" : ".", get(name));
  return out;
}

}  // namespace

std::optional<LaunchEnvironment> read_launch_environment(const GetVariable& get) {
  if (!is_set(get, "RANK") && !is_set(get, "WORLD_SIZE")) {
    if (is_task_of_srun(get)) return read_task_of_srun(get);
    return std::nullopt;
  }
  LaunchEnvironment out;
  out.world_size = number_of(get, "WORLD_SIZE", 1, most_ranks);
  out.rank = number_of(get, "RANK", 0, out.world_size - 1);
  if (is_set(get, "LOCAL_RANK")) out.local_rank = number_of(get, "LOCAL_RANK", 0, out.world_size - 1);
  if (is_set(get, "LOCAL_WORLD_SIZE"))
    out.local_world_size = number_of(get, "LOCAL_WORLD_SIZE", out.local_rank + 1, out.world_size);
  if (out.world_size == 1) return out;
  out.master_address = value_of(get, "MASTER_ADDR");
  // Where torchrun keeps a store of its own on MASTER_PORT, the next port is ours.
  const char* store = get("TORCHELASTIC_USE_AGENT_STORE");
  const int taken = store && std::string_view(store) == "True" ? 1 : 0;
  out.master_port = number_of(get, "MASTER_PORT", 1, last_port - taken) + taken;
  // Restarts are not told apart: torchrun counts them on each machine for itself.
  for (const char* name : {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"})
    if (out.run.empty() && is_set(get, name)) out.run = get(name);
  return out;
}

namespace {

bool says_where_to_meet(const GetVariable& get) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
    if (!is_set(get, name)) return false;
  return true;
}

}  // namespace

std::optional<ProcessLauncher> find_process_launcher(const GetVariable& get) {
  for (const Convention& row : conventions) {
    if (!started_by(row, get)) continue;
    ProcessLauncher out{row.launcher, {}, whole_number(get, row.rank), 0, row.mpi};
    for (const char* name : {row.rank, row.ranks, step_tasks}) {
      if (!is_set(get, name) || out.ranks > 0) continue;
      out.variables.emplace_back(name, get(name));
      // Less than its own rank is said of another launcher's processes, around this one.
      if (name != row.rank && whole_number(get, name) > out.rank) out.ranks = whole_number(get, name);
    }
    return out;
  }
  return std::nullopt;
}

Launcher find_launcher(const GetVariable& get, bool with_mpi) {
  const bool environment = is_set(get, "RANK") || is_set(get, "WORLD_SIZE");
  // torchrun may itself have been started by srun or mpirun, whose variables its processes inherit.
  if (environment && is_set(get, "TORCHELASTIC_RUN_ID")) return Launcher::environment;
  const auto by = find_process_launcher(get);
  // A step of Slurm's has PMI's variables or PMIx's whether somebody speaks that or not; who says where ranks
  // are to meet is believed. (mpirun's ranks are MPI's, whatever else a script has exported.)
  if (says_where_to_meet(get) && (!by || by->name != open_mpi)) return Launcher::environment;
  const bool task = is_task_of_srun(get);
  if (by && by->mpi && with_mpi && !(task && !is_set(get, pmix_rank))) return Launcher::mpi;
  if (environment || task) return Launcher::environment;
  return by && by->ranks != 1 ? Launcher::separate : Launcher::none;
}

std::string idle_nodes(const GetVariable& get) {
  const int nodes = whole_number(get, "SLURM_JOB_NUM_NODES");
  if (nodes <= 1 || whole_number(get, slurm_rank) > 0) return "";
  const bool task = is_task_of_srun(get);
  if (!task && find_launcher(get, true) != Launcher::none) return "";
  const int used = task ? whole_number(get, "SLURM_STEP_NUM_NODES") : 1;
  if (used < 1 || used >= nodes) return "";
  return cat("this run is on ", used, " of the ", nodes, " nodes that the job has: start it as srun --nodes ",
             nodes, " --ntasks-per-node R sherd train …, with R ranks on each");
}

}  // namespace sherd::comm

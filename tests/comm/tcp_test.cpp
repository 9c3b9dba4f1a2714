// The environment of launchers like torchrun, and ranks that meet over TCP: here threads, each with
// connections of its own.
#include <netinet/tcp.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "comm/tcp/socket.h"
#include "support/gpu/lazy_cuda.h"
#include "tests/comm/conformance.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace conformance {
namespace {

/// `machines`: as on_tcp_ranks() takes them.
Case tcp_case(const std::string& name, int ranks, bool shared_memory, const std::vector<int>& machines = {}) {
  Case out;
  out.name = cat(name, ranks);
  out.ranks = ranks;
  out.options.timeout_seconds = 60;
  out.options.shared_memory = shared_memory;
  out.one_machine = shared_memory && machines.empty();
  out.run = [ranks, machines](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    on_tcp_ranks(ranks, options, body, machines);
  };
  return out;
}

INSTANTIATE_TEST_SUITE_P(Tcp, Conformance,
                         ::testing::Values(tcp_case("sockets", 2, false), tcp_case("sockets", 3, false),
                                           tcp_case("sockets", 4, false), tcp_case("shared", 2, true),
                                           tcp_case("shared", 4, true),
                                           tcp_case("interleaved", 3, true, {0, 1, 0})),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace conformance

namespace {

using conformance::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

// ---- the environment ----

using Variables = std::map<std::string, std::string>;

GetVariable getter(const Variables& variables) {
  return [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}
std::optional<LaunchEnvironment> launch_in(const Variables& variables) {
  return read_launch_environment(getter(variables));
}

const Variables torchrun{{"RANK", "5"},
                         {"WORLD_SIZE", "8"},
                         {"LOCAL_RANK", "1"},
                         {"LOCAL_WORLD_SIZE", "4"},
                         {"MASTER_PORT", "29500"},
                         {"MASTER_ADDR", "node0"}};

TEST(LaunchEnvironment, ReadsWhatTorchrunSets) {
  const auto launch = launch_in(torchrun);
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->rank, 5);
  EXPECT_EQ(launch->world_size, 8);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->local_world_size, 4);
  EXPECT_EQ(launch->master_address, "node0");
  EXPECT_EQ(launch->master_port, 29500);
  Variables elastic = torchrun;
  elastic["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(launch_in(elastic)->master_port, 29501);
}

TEST(LaunchEnvironment, NeedsNoWordOfTheMachine) {
  Variables slurm = torchrun;
  slurm.erase("LOCAL_RANK"), slurm.erase("LOCAL_WORLD_SIZE");
  slurm["SLURM_JOB_ID"] = "4711";
  const auto launch = launch_in(slurm);
  EXPECT_EQ(launch->local_rank, -1);
  EXPECT_EQ(launch->local_world_size, 0);
  EXPECT_EQ(launch->run, "4711");
}

TEST(LaunchEnvironment, IsAbsentWithoutALauncher) {
  EXPECT_FALSE(launch_in({}));
  EXPECT_FALSE(launch_in({{"MASTER_ADDR", "node0"}, {"RANK", ""}}));
}

TEST(LaunchEnvironment, OneRankNeedsNoMaster) {
  EXPECT_EQ(launch_in({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}})->world_size, 1);
}

TEST(LaunchEnvironment, NamesWhatIsMissingOrWrong) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables partial = torchrun;
    partial.erase(name);
    EXPECT_THAT(error_of(ErrorKind::usage, [&] { launch_in(partial); }),
                AllOf(HasSubstr(name), HasSubstr("torchrun")));
  }
  for (const auto& [name, value] : Variables{{"RANK", "8"},
                                             {"WORLD_SIZE", "many"},
                                             {"LOCAL_RANK", "-1"},
                                             {"MASTER_PORT", "70000"},
                                             {"LOCAL_WORLD_SIZE", "1"}}) {
    Variables wrong = torchrun;
    wrong[name] = value;
    EXPECT_THAT(error_of(ErrorKind::usage, [&] { launch_in(wrong); }),
                AllOf(HasSubstr(name), HasSubstr(value)));
  }
}

Launcher found(const Variables& variables, bool with_mpi) {
  return find_launcher(getter(variables), with_mpi);
}

TEST(FindLauncher, TellsThemApart) {
  EXPECT_EQ(found({}, true), Launcher::none);
  EXPECT_EQ(found({{"MASTER_ADDR", "node0"}}, true), Launcher::none);
  EXPECT_EQ(found(torchrun, true), Launcher::environment);
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
    EXPECT_EQ(found({{name, "2"}}, true), Launcher::mpi) << name;
    EXPECT_EQ(found({{name, "2"}}, false), Launcher::separate) << name;
    Variables both = torchrun;
    both[name] = "1";
    const bool mpirun = std::string_view(name).starts_with("OMPI");
    EXPECT_EQ(found(both, true), mpirun ? Launcher::mpi : Launcher::environment) << name;
    EXPECT_EQ(found(both, false), Launcher::environment) << name;
    both["TORCHELASTIC_RUN_ID"] = "none";
    EXPECT_EQ(found(both, true), Launcher::environment) << "torchrun started by srun";
  }
}

/// As Slurm sets them: in a batch script of a job of four tasks, in a step of as many, in the one of a shell.
const Variables batch_script{{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}};
Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}
const Variables step = with(batch_script, {{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}}),
                shell = with(step, {{"SLURM_STEP_NUM_TASKS", "1"}});

TEST(FindLauncher, KnowsTasksThatNothingJoins) {
  for (const bool with_mpi : {false, true}) {
    EXPECT_EQ(found(batch_script, with_mpi), Launcher::none);
    EXPECT_EQ(found(shell, with_mpi), Launcher::none);
    EXPECT_EQ(found(step, with_mpi), Launcher::separate);
    EXPECT_EQ(found({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}}, with_mpi), Launcher::separate);
    EXPECT_EQ(found(with(step, torchrun), with_mpi), Launcher::environment);
  }
  for (const char* name : {"MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE"}) {
    EXPECT_EQ(found({{name, "2"}}, false), Launcher::separate) << name;
    EXPECT_EQ(found({{name, "1"}}, false), Launcher::none) << name;
  }
  EXPECT_EQ(found({{"PALS_RANKID", "0"}}, false), Launcher::separate);
  EXPECT_EQ(found(with(step, {{"PMIX_RANK", "0"}}), true), Launcher::mpi) << "srun --mpi=pmix";
  EXPECT_EQ(found(with(step, {{"PMIX_RANK", "0"}}), false), Launcher::separate);
  // One process is no fewer than all there are.
  EXPECT_EQ(found(with(shell, {{"PMIX_RANK", "0"}}), false), Launcher::none);
  EXPECT_EQ(found({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, false), Launcher::none);
  EXPECT_EQ(found({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}, false), Launcher::none);
}

/// As srun sets them for task 5 of "sbatch -N 3 --ntasks-per-node 3" whose last node has one fewer.
const Variables task{{"SLURM_JOB_ID", "4711"},
                     {"SLURM_STEP_ID", "2"},
                     {"SLURM_STEP_NUM_TASKS", "8"},
                     {"SLURM_NTASKS", "9"},
                     {"SLURM_PROCID", "5"},
                     {"SLURM_LOCALID", "2"},
                     {"SLURM_NODEID", "1"},
                     {"SLURM_STEP_TASKS_PER_NODE", "3(x2),2"},
                     {"SLURM_STEP_NODELIST", "gpu[007-008,12]"}};

TEST(Slurm, TasksOfSrunNeedNobodyElse) {
  for (const bool with_mpi : {false, true}) {
    EXPECT_EQ(found(task, with_mpi), Launcher::environment);
    // srun --mpi=pmi2, which numbers them alike.
    EXPECT_EQ(found(with(task, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}}), with_mpi), Launcher::environment);
    EXPECT_EQ(found(with(task, {{"PMIX_RANK", "5"}}), with_mpi),
              with_mpi ? Launcher::mpi : Launcher::environment);
  }
  // MPICH's mpiexec, called in one of the step's tasks.
  EXPECT_EQ(found(with(task, {{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}}), true), Launcher::mpi);
  EXPECT_EQ(found(with(task, {{"FLUX_TASK_RANK", "0"}, {"FLUX_JOB_SIZE", "4"}}), false), Launcher::separate);
  EXPECT_EQ(found(with(task, {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}}), true), Launcher::none);
  const auto launch = launch_in(task);
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->rank, 5);
  EXPECT_EQ(launch->world_size, 8);
  EXPECT_EQ(launch->local_rank, 2);
  EXPECT_EQ(launch->local_world_size, 3);
  EXPECT_EQ(launch->master_address, "gpu007");
  EXPECT_EQ(launch->run, "4711.2");
  EXPECT_EQ(launch_in(with(task, {{"SLURM_NODEID", "2"}}))->local_world_size, 2);
  EXPECT_EQ(
      launch_in(with(task, {{"SLURM_STEP_TASKS_PER_NODE", "8"}, {"SLURM_NODEID", "0"}}))->local_world_size,
      8);
  const auto told = launch_in(with(task, {{"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "29500"}}));
  EXPECT_EQ(told->master_address, "10.0.0.7");
  EXPECT_EQ(told->master_port, 29500);
  EXPECT_EQ(told->world_size, 8);
  EXPECT_EQ(launch_in(with(task, torchrun))->rank, 5) << "RANK and WORLD_SIZE go before";
  EXPECT_EQ(launch_in(with(task, torchrun))->master_address, "node0");
}

TEST(Slurm, NodesThatARunLeavesIdleAreTold) {
  const auto told = [](const Variables& variables) { return idle_nodes(getter(variables)); };
  const Variables nodes{{"SLURM_JOB_NUM_NODES", "3"}};
  const auto on = [&](const Variables& variables, const char* used) {
    return with(with(variables, nodes), {{"SLURM_STEP_NUM_NODES", used}, {"SLURM_PROCID", "0"}});
  };
  EXPECT_THAT(told(with(batch_script, nodes)), HasSubstr("1 of the 3 nodes"));
  EXPECT_THAT(told(on(task, "2")), HasSubstr("2 of the 3 nodes"));
  EXPECT_EQ(told(on(task, "3")), "");
  EXPECT_EQ(told(with(with(task, nodes), {{"SLURM_STEP_NUM_NODES", "2"}})), "") << "task 0 says so";
  EXPECT_EQ(told(with(with(batch_script, nodes), torchrun)), "") << "torchrun's agents may be everywhere";
  EXPECT_EQ(told(batch_script), "");
  EXPECT_EQ(told({}), "");
}

TEST(Slurm, StepsMeetAtPortsOfTheirOwn) {
  std::set<int> ports;
  for (const char* job : {"4711", "4712", "4713", "1000004711"})
    for (const char* number : {"0", "1", "7", "15"}) {
      const int port = launch_in(with(task, {{"SLURM_JOB_ID", job}, {"SLURM_STEP_ID", number}}))->master_port;
      EXPECT_GE(port, 1024);
      EXPECT_LT(port, 32768) << "from there on the system gives out others'";
      ports.insert(port);
    }
  EXPECT_EQ(ports.size(), 16u);
  EXPECT_EQ(launch_in(task)->master_port, launch_in(with(task, {{"SLURM_PROCID", "0"}}))->master_port);
  EXPECT_EQ(launch_in(with(task, {{"SLURM_STEP_RESV_PORTS", "12000-12003"}}))->master_port, 12000);
  EXPECT_EQ(launch_in(with(task, {{"SLURM_RESTART_COUNT", "1"}}))->run, "4711.2.1") << "was requeued";
}

TEST(Slurm, TheFirstHostOfAList) {
  for (const auto& [list, host] : Variables{{"node0", "node0"},
                                            {"node1,node0", "node1"},
                                            {"node[03-07,9]", "node03"},
                                            {"a[1,2]-b[5-6],c", "a1-b5"},
                                            {"rack[2]n[10-11]", "rack2n10"},
                                            {"gpu[12]", "gpu12"}})
    EXPECT_EQ(first_host(list), host) << list;
  for (const char* list : {"", ",a", "a[", "a[]", "a[-2]"})
    EXPECT_THAT(error_of(ErrorKind::usage, [&] { first_host(list); }), HasSubstr("begins with no host"))
        << list;
}

TEST(FindLauncher, TakesTheNumberOfTheLauncherWithin) {
  const auto ranks = [](const Variables& variables) {
    return find_process_launcher(getter(variables)).value_or(ProcessLauncher{}).ranks;
  };
  EXPECT_EQ(ranks(step), 4);
  EXPECT_EQ(ranks(with(step, {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}})), 2);
  EXPECT_EQ(ranks(with(step, {{"PMIX_RANK", "3"}})), 4);
  EXPECT_EQ(ranks({{"PMIX_RANK", "3"}}), 0);
  EXPECT_EQ(ranks(with(shell, {{"PMIX_RANK", "3"}})), 0) << "of the shell in which prterun was called";
  EXPECT_EQ(
      ranks(with(step, {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"PMIX_RANK", "5"}})),
      8);
}

/// A connection to a machine that is lost ends, one to a process that takes nothing stays.
TEST(Socket, WatchesTheMachineAndNotTheProcess) {
  const int port = free_port();
  const FileDescriptor listener = listen_on(port), here = knock(port);
  FileDescriptor there;
  const Deadline deadline = Deadline::after_seconds(20);
  while (!there && !deadline.passed()) there = accept_from(listener);
  ASSERT_TRUE(there);
  for (const FileDescriptor* socket : std::initializer_list<const FileDescriptor*>{&here, &there}) {
    int watched = 0, timeout = -1;
    socklen_t size = sizeof watched;
    EXPECT_EQ(getsockopt(socket->get(), SOL_SOCKET, SO_KEEPALIVE, &watched, &size), 0);
    EXPECT_EQ(getsockopt(socket->get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &size), 0);
    EXPECT_EQ(watched, 1);
    EXPECT_EQ(timeout, 0);
  }
}

// ---- the mesh ----

/// Messages that a failed group had under way neither hold up nor tear those of its parent.
TEST(Tcp, APartThatFailsLeavesTheWorldWhole) {
  on_tcp_ranks(3, {.timeout_seconds = 60, .shared_memory = false}, [](Communicator& comm) {
    auto device = device::make_cpu_device(1);
    {
      const auto part = comm.split(0, comm.rank());
      std::optional<Tensor> big = Tensor::zeros(*device, {8 << 20}, DType::f32);
      if (comm.rank() == 0) {
        error_of(ErrorKind::comm, [&] {
          const Work sent = part->send(*big, 1, {.async = true});  // nobody receives it
          part->barrier();
        });
        big.reset();
      } else if (comm.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        part->abort("enough");
      } else {
        error_of(ErrorKind::comm, [&] { part->barrier(); });
      }
    }
    const Tensor x = Tensor::zeros(*device, {100'000}, DType::f32);
    conformance::fill<float>(x, comm.rank());
    comm.all_reduce(x);
    conformance::expect_bits<float>(
        x, [](std::int64_t i) { return conformance::reference_sum<float>(3, i); }, "after");
  });
}

/// Tensors of a GPU do not lie in windows, which its kernels cannot reach.
TEST(Tcp, MemoryOfAGpuIsTheGpus) {
  on_tcp_ranks(2, {.timeout_seconds = 60}, [](Communicator& comm) {
    const auto gpu = std::make_shared<sherd::testing::LazyCudaDevice>();
    comm.bind(gpu);
    const auto storage = comm.allocate(*gpu, 5000, device::Category::communication);
    EXPECT_TRUE(gpu->in_gpu_memory(storage.data()));
    const Tensor x = Tensor::view_of(storage, 0, {1250}, DType::f32);
    gpu->submit(gpu->compute_stream(), [&] { conformance::fill<float>(x, comm.rank()); });
    comm.all_reduce(x);
    gpu->synchronize();
    conformance::expect_bits<float>(
        x, [](std::int64_t i) { return conformance::reference_sum<float>(2, i); }, "sum");
  });
}

TEST(Tcp, ARankThatEndsIsNamed) {
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [] {
                         on_tcp_ranks(3, {.timeout_seconds = 30}, [](Communicator& comm) {
                           EXPECT_EQ(comm.name(), "tcp(3)");
                           comm.barrier();
                           if (comm.rank() != 2) comm.barrier({.label = "last"});
                         });
                       }),
              AllOf(HasSubstr("rank 2 has left"), HasSubstr("\"last\"")));
}

}  // namespace

}  // namespace sherd::comm

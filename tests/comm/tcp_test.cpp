// What launchers like torchrun say, and the ranks that meet over TCP: here threads, each with connections of its own.
#include <arpa/inet.h>
#include <netinet/tcp.h>

#include <chrono>
#include <future>
#include <map>
#include <optional>
#include <thread>

#include "comm/tcp/rendezvous.h"
#include "support/lazy_cuda.h"
#include "tests/comm/conformance.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace conformance {
namespace {

Case tcp_case(const std::string& name, int ranks, bool shared_memory) {
  Case out;
  out.name = cat(name, ranks);
  out.ranks = ranks;
  out.options.timeout_seconds = 60;
  out.options.shared_memory = shared_memory;
  out.run = [ranks](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    on_tcp_ranks(ranks, options, body);
  };
  return out;
}

INSTANTIATE_TEST_SUITE_P(Tcp, Conformance,
                         ::testing::Values(tcp_case("sockets", 2, false), tcp_case("sockets", 3, false),
                                         tcp_case("sockets", 4, false), tcp_case("shared", 2, true),
                                         tcp_case("shared", 4, true)),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace conformance

namespace {

using conformance::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

// ---- the environment ----

using Variables = std::map<std::string, std::string>;

std::optional<LaunchEnvironment> read(const Variables& variables) {
  return read_launch_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

const Variables torchrun{{"RANK", "5"},       {"WORLD_SIZE", "8"},        {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"},
                         {"MASTER_PORT", "29500"}, {"MASTER_ADDR", "node0"}};

TEST(LaunchEnvironment, ReadsWhatTorchrunSets) {
  const auto launch = read(torchrun);
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->rank, 5);
  EXPECT_EQ(launch->world_size, 8);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->local_world_size, 4);
  EXPECT_EQ(launch->master_address, "node0");
  EXPECT_EQ(launch->master_port, 29500);
  Variables elastic = torchrun;
  elastic["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(read(elastic)->master_port, 29501);
}

TEST(LaunchEnvironment, NeedsNoWordOfTheMachine) {
  Variables slurm = torchrun;
  slurm.erase("LOCAL_RANK"), slurm.erase("LOCAL_WORLD_SIZE");
  slurm["SLURM_JOB_ID"] = "4711";
  const auto launch = read(slurm);
  EXPECT_EQ(launch->local_rank, -1);
  EXPECT_EQ(launch->local_world_size, 0);
  EXPECT_EQ(launch->run, "4711");
}

TEST(LaunchEnvironment, IsAbsentWithoutALauncher) {
  EXPECT_FALSE(read({}));
  EXPECT_FALSE(read({{"MASTER_ADDR", "node0"}, {"RANK", ""}}));
}

TEST(LaunchEnvironment, OneRankNeedsNoMaster) {
  EXPECT_EQ(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}})->world_size, 1);
}

TEST(LaunchEnvironment, NamesWhatIsMissingOrWrong) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables partial = torchrun;
    partial.erase(name);
    EXPECT_THAT(error_of(ErrorKind::usage, [&] { read(partial); }), AllOf(HasSubstr(name), HasSubstr("torchrun")));
  }
  for (const auto& [name, value] : Variables{{"RANK", "8"}, {"WORLD_SIZE", "many"}, {"LOCAL_RANK", "-1"},
                                             {"MASTER_PORT", "70000"}, {"LOCAL_WORLD_SIZE", "1"}}) {
    Variables wrong = torchrun;
    wrong[name] = value;
    EXPECT_THAT(error_of(ErrorKind::usage, [&] { read(wrong); }), AllOf(HasSubstr(name), HasSubstr(value)));
  }
}

Launcher found(const Variables& variables, bool with_mpi) {
  return find_launcher(
      [&](const char* name) {
        const auto at = variables.find(name);
        return at == variables.end() ? nullptr : at->second.c_str();
      },
      with_mpi);
}

TEST(FindLauncher, TellsThemApart) {
  EXPECT_EQ(found({}, true), Launcher::none);
  EXPECT_EQ(found({{"MASTER_ADDR", "node0"}}, true), Launcher::none);
  EXPECT_EQ(found(torchrun, true), Launcher::environment);
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
    EXPECT_EQ(found({{name, "1"}}, true), Launcher::mpi) << name;
    EXPECT_EQ(found({{name, "1"}}, false), Launcher::mpi) << "which says that it was not built";
    Variables both = torchrun;
    both[name] = "1";
    EXPECT_EQ(found(both, true), Launcher::mpi) << name;
    EXPECT_EQ(found(both, false), Launcher::environment) << name;
    both["TORCHELASTIC_RUN_ID"] = "none";
    EXPECT_EQ(found(both, true), Launcher::environment) << "torchrun started by srun";
  }
}

// ---- the meeting ----

TEST(Rendezvous, NamesRanksThatDoNotCome) {
  const auto start = std::chrono::steady_clock::now();
  const int port = free_port();
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(0, 3, port), {1, "meeting"}); }),
              HasSubstr("ranks 1, 2 did not come to rank 0 within 1 s"));
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(2, 3, port), {1, "meeting"}); }),
              AllOf(HasSubstr("rank 2 could not reach rank 0 at 127.0.0.1"), HasSubstr("refused"),
                    HasSubstr("MASTER_ADDR")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Rendezvous, RefusesRanksThatContradictEachOther) {
  for (const bool twice : {false, true}) {
    const int port = free_port();
    std::vector<std::thread> others;
    for (int k = 0; k < 2; ++k)
      others.emplace_back([&, k] {
        try {
          rendezvous(launch_of(twice ? 1 : k + 1, twice ? 3 : 4, port), {5, "meeting"});
        } catch (const Error&) {  // their connection to rank 0 ends
        }
      });
    EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(0, 3, port), {30, "meeting"}); }),
                HasSubstr(twice ? "two processes came as rank 1" : "of 4, where this is rank 0 of 3"));
    for (std::thread& other : others) other.join();
  }
}

/// Runs rank r of `size` on a thread each; what each threw, or empty.
std::vector<std::string> meet(int size, const std::function<LaunchEnvironment(int)>& launch, double seconds,
                              const std::function<void()>& meanwhile = [] {}) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<Meeting> meetings(errors.size());  // kept: who leaves early is missed by the others
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        meetings[static_cast<std::size_t>(r)] = rendezvous(launch(r), {seconds, "meeting"});
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::comm);
        errors[static_cast<std::size_t>(r)] = error.what();
      }
    });
  meanwhile();
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(Rendezvous, TellsAllRanksOfAContradiction) {
  const int port = free_port();
  const auto errors = meet(3, [&](int r) { return launch_of(std::min(r, 1), 3, port); }, 30);
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("two processes came as rank 1"));
}

TEST(Rendezvous, FindsRankZeroByNameAndOverBothProtocols) {
  for (const char* name : {"localhost", "::1", "127.0.0.1"}) {
    if (std::string(name) == "::1" && !Descriptor(socket(AF_INET6, SOCK_STREAM, 0))) continue;
    const int port = free_port();
    const auto errors = meet(
        3,
        [&](int r) {
          LaunchEnvironment launch = launch_of(r, 3, port);
          launch.master_address = name;
          return launch;
        },
        30);
    EXPECT_THAT(errors, ::testing::Each("")) << name;
  }
}

Descriptor knock(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET, address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Descriptor out;
  const Deadline deadline = Deadline::after_seconds(20);
  while (!(out = connect_to(reinterpret_cast<sockaddr*>(&address), sizeof address, deadline)) && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(out);
  return out;
}

/// Ranks that can only be on this machine are reached from it only: on their loopback address, not on all.
TEST(Rendezvous, ListensToThisMachineOnlyWhereThatIsTheMaster) {
  const auto reached = [](const char* master, const char* address) {
    LaunchEnvironment launch = launch_of(0, 2, free_port()), other = launch_of(1, 3, launch.master_port);
    launch.master_address = master;
    std::thread waiting([&] {
      error_of(ErrorKind::comm, [&] { rendezvous(launch, {30, "meeting"}); });
    });
    const Descriptor first = knock(launch.master_port);  // it listens now
    sockaddr_in at{};
    at.sin_family = AF_INET, at.sin_port = htons(static_cast<std::uint16_t>(launch.master_port));
    EXPECT_EQ(inet_pton(AF_INET, address, &at.sin_addr), 1);
    const auto out = connect_to(reinterpret_cast<sockaddr*>(&at), sizeof at, Deadline::after_seconds(5));
    error_of(ErrorKind::comm, [&] { rendezvous(other, {30, "meeting"}); });  // ends it by its contradiction
    waiting.join();
    return static_cast<bool>(out);
  };
  EXPECT_TRUE(reached("127.0.0.1", "127.0.0.1"));
  EXPECT_FALSE(reached("127.0.0.1", "127.0.0.2"));
  EXPECT_TRUE(reached("0.0.0.0", "127.0.0.2")) << "the test sees what listens on all addresses";
}

TEST(Rendezvous, TurnsStrangersAway) {
  const int port = free_port();
  std::promise<void> knocked;
  const auto start = std::chrono::steady_clock::now();
  std::vector<Descriptor> strangers;
  const auto errors = meet(
      2,
      [&](int r) {
        if (r == 1) knocked.get_future().wait();  // rank 1 comes when the strangers are there
        return launch_of(r, 2, port);
      },
      60,
      [&] {
        strangers.push_back(knock(port));  // says nothing
        strangers.push_back(knock(port));
        const std::string noise(1000, 'x');
        EXPECT_TRUE(send_all(strangers.back(), noise.data(), noise.size(), Deadline::after_seconds(5)));
        knocked.set_value();
      });
  EXPECT_THAT(errors, ::testing::Each(""));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Rendezvous, ARankOfAnotherRunDoesNoHarm) {
  const int port = free_port();
  std::string late;
  std::thread stale;
  const auto errors = meet(
      2,
      [&](int r) {
        LaunchEnvironment launch = launch_of(r, 2, port);
        launch.run = "tuesday";
        if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
        return launch;
      },
      30,
      [&] {
        stale = std::thread([&] {
          LaunchEnvironment launch = launch_of(1, 2, port);
          launch.run = "monday";
          late = error_of(ErrorKind::comm, [&] { rendezvous(launch, {1.5, "meeting"}); });
        });
      });
  stale.join();
  EXPECT_THAT(errors, ::testing::Each(""));
  EXPECT_THAT(late, HasSubstr("could not reach rank 0"));
}

TEST(Rendezvous, NamesAPortThatIsInUse) {
  const Descriptor other = listen_on(0);
  const int port = port_of(other);
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(0, 2, port), {1, "meeting"}); }),
              AllOf(HasSubstr(cat("port ", port)), HasSubstr("in use"), HasSubstr("MASTER_PORT")));
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(1, 2, port), {1, "meeting"}); }),
              AllOf(HasSubstr("could not reach rank 0"), HasSubstr("does not answer")));
}

TEST(Rendezvous, NamesARankThatEndsBeforeAllHaveMet) {
  const int port = free_port();
  const auto start = std::chrono::steady_clock::now();
  std::thread hasty([&] {
    try {
      rendezvous(launch_of(1, 3, port), {2, "meeting"});
    } catch (const Error&) {  // it is not told in time that rank 2 does not come
    }
  });
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(0, 3, port), {60, "meeting"}); }),
              HasSubstr("rank 1 ended before all ranks had met"));
  hasty.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

/// Ranks that came before rank 0 did wait on for what it says at its deadline.
TEST(Rendezvous, NamesWhoIsMissingToThoseWhoCameFirst) {
  const int port = free_port();
  const auto errors = meet(
      2,
      [&](int r) {
        if (r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(400));
        return launch_of(r, 3, port);
      },
      4);
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("rank 2 did not come to rank 0"));
}

/// The system may give a connection the very port that it goes to, where nobody listens there yet.
TEST(Rendezvous, NobodyMeetsItself) {
  const auto range = ephemeral_ports();
  int port = 0;
  for (int at = (range.first + range.second) / 4 * 2; port == 0 && at < range.second; at += 2)
    if (listen_on(at)) port = at;
  ASSERT_NE(port, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET, address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const Deadline deadline = Deadline::after_seconds(20);
  for (int turn = 0; turn < 2 * (range.second - range.first) && !deadline.passed(); ++turn)
    ASSERT_FALSE(connect_to(reinterpret_cast<sockaddr*>(&address), sizeof address, deadline)) << "after " << turn;
}

TEST(Rendezvous, NamesAnAddressThatDoesNotExist) {
  LaunchEnvironment launch = launch_of(1, 2, free_port());
  launch.master_address = "no-such-host.invalid";
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch, {1, "meeting"}); }),
              AllOf(HasSubstr("no-such-host.invalid"), HasSubstr("MASTER_ADDR")));
}

/// A connection to a machine that is lost ends, one to a process that takes nothing stays.
TEST(Socket, WatchesTheMachineAndNotTheProcess) {
  const int port = free_port();
  const Descriptor listener = listen_on(port), here = knock(port);
  Descriptor there;
  const Deadline deadline = Deadline::after_seconds(20);
  while (!there && !deadline.passed()) there = accept_from(listener);
  ASSERT_TRUE(there);
  for (const Descriptor* socket : std::initializer_list<const Descriptor*>{&here, &there}) {
    int watched = 0, timeout = -1;
    socklen_t size = sizeof watched;
    EXPECT_EQ(getsockopt(socket->get(), SOL_SOCKET, SO_KEEPALIVE, &watched, &size), 0);
    EXPECT_EQ(getsockopt(socket->get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &size), 0);
    EXPECT_EQ(watched, 1);
    EXPECT_EQ(timeout, 0);
  }
}

// ---- the mesh ----

/// What a failed group had under way neither keeps nor tears what its parent sends.
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
    conformance::expect_bits<float>(x, [](std::int64_t i) { return conformance::reference_sum<float>(3, i); }, "after");
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
    conformance::expect_bits<float>(x, [](std::int64_t i) { return conformance::reference_sum<float>(2, i); }, "sum");
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

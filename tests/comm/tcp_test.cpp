// What launchers like torchrun say, and the ranks that meet over TCP: here threads, each with connections of its own.
#include <chrono>
#include <map>
#include <thread>

#include "comm/tcp/mesh.h"
#include "tests/comm/conformance.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
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

TEST(LaunchEnvironment, IsAbsentWithoutALauncher) {
  EXPECT_FALSE(read({}));
  EXPECT_FALSE(read({{"MASTER_ADDR", "node0"}, {"RANK", ""}}));
}

TEST(LaunchEnvironment, OneRankNeedsNoMaster) {
  EXPECT_EQ(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}})->world_size, 1);
}

TEST(LaunchEnvironment, NamesWhatIsMissingOrWrong) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
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

// ---- the meeting ----

TEST(Rendezvous, NamesRanksThatDoNotCome) {
  const auto start = std::chrono::steady_clock::now();
  const int port = free_port();
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(0, 3, port), {0.3, "meeting"}); }),
              HasSubstr("ranks 1, 2 did not come to rank 0 within 0.3 s"));
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(2, 3, port), {0.3, "meeting"}); }),
              AllOf(HasSubstr("rank 2 could not reach rank 0 at 127.0.0.1"), HasSubstr("refused"),
                    HasSubstr("MASTER_ADDR")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Rendezvous, RefusesRanksThatContradictEachOther) {
  for (const bool twice : {false, true}) {
    const int port = free_port();
    std::vector<std::thread> others;
    for (int k = 0; k < 2; ++k)
      others.emplace_back([&, k] {
        try {
          rendezvous(launch_of(twice ? 1 : k + 1, twice ? 3 : 4, port), {2, "meeting"});
        } catch (const Error&) {  // their connection to rank 0 ends
        }
      });
    EXPECT_THAT(error_of(ErrorKind::comm, [&] { rendezvous(launch_of(0, 3, port), {5, "meeting"}); }),
                HasSubstr(twice ? "two processes came as rank 1" : "of 4, where this is rank 0 of 3"));
    for (std::thread& other : others) other.join();
  }
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

// Ranks that meet over TCP: here threads, each with connections of its own, or a process that dies.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <sys/wait.h>

#include <chrono>
#include <future>
#include <thread>

#include "comm/tcp/rendezvous.h"
#include "tests/comm/conformance.h"
#include "tests/comm/tcp_ranks.h"

namespace {
/// Where connect() ends this process, unless it goes to that port; 0: nowhere.
int deadly_unless = 0;
}  // namespace

/// In the place of the C library's.
extern "C" int connect(int socket, const sockaddr* address, socklen_t length) {
  const auto* to = reinterpret_cast<const sockaddr_in*>(address);
  if (deadly_unless && address->sa_family == AF_INET && ntohs(to->sin_port) != deadly_unless) _exit(3);
  static const auto real =
      reinterpret_cast<int (*)(int, const sockaddr*, socklen_t)>(dlsym(RTLD_NEXT, "connect"));
  return real(socket, address, length);
}

namespace sherd::comm {
namespace {

using conformance::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Rendezvous, NamesRanksThatDoNotCome) {
  const auto start = std::chrono::steady_clock::now();
  const int port = free_port();
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [&] {
                         rendezvous(launch_of(0, 3, port), {1, "meeting"});
                       }),
              HasSubstr("ranks 1, 2 did not come to rank 0 within 1 s"));
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [&] {
                         rendezvous(launch_of(2, 3, port), {1, "meeting"});
                       }),
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
    EXPECT_THAT(error_of(ErrorKind::comm,
                         [&] {
                           rendezvous(launch_of(0, 3, port), {30, "meeting"});
                         }),
                HasSubstr(twice ? "two processes came as rank 1" : "of 4, where this is rank 0 of 3"));
    for (std::thread& other : others) other.join();
  }
}

/// Runs rank r of `size` on a thread each; what each threw, or empty.
std::vector<std::string> meet(
    int size, const std::function<LaunchEnvironment(int)>& launch, double seconds,
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
  const auto errors = meet(
      3, [&](int r) { return launch_of(std::min(r, 1), 3, port); }, 30);
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("two processes came as rank 1"));
}

TEST(Rendezvous, FindsRankZeroByNameAndOverBothProtocols) {
  for (const char* name : {"localhost", "::1", "127.0.0.1"}) {
    if (std::string(name) == "::1" && !FileDescriptor(socket(AF_INET6, SOCK_STREAM, 0))) continue;
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

/// Ranks that can only be on this machine are reached from it only: on their loopback address, not on all.
TEST(Rendezvous, ListensToThisMachineOnlyWhereThatIsTheMaster) {
  const auto reached = [](const char* master, const char* address) {
    LaunchEnvironment launch = launch_of(0, 2, free_port()), other = launch_of(1, 3, launch.master_port);
    launch.master_address = master;
    std::thread waiting([&] { error_of(ErrorKind::comm, [&] { rendezvous(launch, {30, "meeting"}); }); });
    const FileDescriptor first = knock(launch.master_port);  // it listens now
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
  std::vector<FileDescriptor> strangers;
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
  const FileDescriptor other = listen_on(0);
  const int port = port_of(other);
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [&] {
                         rendezvous(launch_of(0, 2, port), {1, "meeting"});
                       }),
              AllOf(HasSubstr(cat("port ", port)), HasSubstr("in use"), HasSubstr("MASTER_PORT")));
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [&] {
                         rendezvous(launch_of(1, 2, port), {1, "meeting"});
                       }),
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
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [&] {
                         rendezvous(launch_of(0, 3, port), {60, "meeting"});
                       }),
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
    ASSERT_FALSE(connect_to(reinterpret_cast<sockaddr*>(&address), sizeof address, deadline))
        << "after " << turn;
}

TEST(Rendezvous, NamesAnAddressThatDoesNotExist) {
  LaunchEnvironment launch = launch_of(1, 2, free_port());
  launch.master_address = "no-such-host.invalid";
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [&] {
                         rendezvous(launch, {1, "meeting"});
                       }),
              AllOf(HasSubstr("no-such-host.invalid"), HasSubstr("MASTER_ADDR")));
}

/// Rank 2 dies when it has been told who all are, on its way to the first of them. Rank 3 leaves because it
/// cannot reach it, rank 1 misses both: all blame rank 2.
TEST(Rendezvous, NamesTheRankThatDiesOnItsWayToTheOthers) {
  const int port = free_port();
  const pid_t child = fork();
  if (child == 0) {
    deadly_unless = port;
    try {
      rendezvous(launch_of(2, 4, port), {60, "meeting"});
    } catch (const std::exception&) {
    }
    _exit(4);
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> errors(4);
  std::vector<std::thread> threads;
  for (const int r : {0, 1, 3})
    threads.emplace_back([&, r] {
      errors[static_cast<std::size_t>(r)] = error_of(ErrorKind::comm, [&] {
        rendezvous(launch_of(r, 4, port), {60, "meeting"});
      });
    });
  for (std::thread& thread : threads) thread.join();
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 3) << "it came to none of the others";
  for (const int r : {0, 1, 3}) {
    const std::string& text = errors[static_cast<std::size_t>(r)];
    EXPECT_THAT(text, ::testing::AnyOf(HasSubstr("rank 2 ended before all ranks had met"),
                                       HasSubstr("could not reach rank 2")))
        << "rank " << r;
    EXPECT_EQ(text, errors[0]);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30))
      << "nobody waits for the deadline";
}

}  // namespace
}  // namespace sherd::comm

// Whether another process of the machine still runs.
#include "comm/processes/identity.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

namespace sherd::comm {
namespace {

/// A process that does nothing until it is killed.
struct Child {
  Child() {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid = fork();
    if (pid == 0) {
      const RankIdentity own = own_identity();
      if (write(ready[1], &own, sizeof own) != sizeof own) _exit(1);
      for (;;) pause();
    }
    close(ready[1]);
    EXPECT_EQ(read(ready[0], &identity, sizeof identity), static_cast<ssize_t>(sizeof identity));
    close(ready[0]);
  }
  void kill_and_leave() { ASSERT_EQ(kill(pid, SIGKILL), 0); }
  void reap() { ASSERT_EQ(waitpid(pid, nullptr, 0), pid); }
  pid_t pid = -1;
  RankIdentity identity;
};

TEST(RankIdentity, TellsRunningFromDeadAndFromAnotherOfTheSameNumber) {
  Child child;
  EXPECT_TRUE(running(own_identity()));
  EXPECT_TRUE(running(child.identity));
  RankIdentity other = child.identity;
  ++other.started;
  EXPECT_FALSE(running(other));
  child.kill_and_leave();
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(running(child.identity));  // a zombie
  child.reap();
  EXPECT_FALSE(running(child.identity));
}

TEST(RankIdentity, LooksAtProcessesInTheMomentTheyGo) {
  for (int i = 0; i < 60; ++i) {
    Child child;
    std::atomic<bool> reaped = false;
    std::jthread reaper([&] {
      child.kill_and_leave();
      child.reap();
      reaped = true;
    });
    while (running(child.identity)) {
    }
    while (!reaped) EXPECT_FALSE(running(child.identity));
  }
}

/// Nobody is taken for dead by a process that has run out of descriptors.
TEST(RankIdentity, WithoutDescriptorsNobodyIsDead) {
  Child child;
  rlimit limit, none;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  none = limit;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool without = running(child.identity);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(without);
  child.kill_and_leave();
  child.reap();
}

}  // namespace
}  // namespace sherd::comm

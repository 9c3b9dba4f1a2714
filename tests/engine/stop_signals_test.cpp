#include "engine/stop_signals.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>
#include <thread>
#include <vector>

#include "support/borrowed_stack.h"

namespace sherd::engine {
namespace {

using sherd::testing::BorrowedStack;
using Handler = void (*)(int);

struct sigaction action_of(int signal) {
  struct sigaction now {};
  ::sigaction(signal, nullptr, &now);
  return now;
}
Handler handler_of(int signal) {
  return action_of(signal).sa_handler;
}

/// To this process, as kill(1) does, and waits until it is taken.
void send(int signal) {
  ::kill(::getpid(), signal);
  for (int waited = 0; StopSignals::received() != signal && waited < 5000; ++waited) ::usleep(1000);
  EXPECT_EQ(StopSignals::received(), signal);
}

bool is_blocked(int signal) {
  sigset_t now;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &now);
  return ::sigismember(&now, signal) == 1;
}

TEST(StopSignals, AreTakenOnceAndGivenBackByTheLast) {
  const Handler before = handler_of(SIGTERM);
  {
    const StopSignals first;
    EXPECT_EQ(StopSignals::received(), 0);
    { const StopSignals second; }
    EXPECT_TRUE(is_blocked(SIGTERM));
    send(SIGTERM);
  }
  EXPECT_EQ(handler_of(SIGTERM), before);
  EXPECT_FALSE(is_blocked(SIGTERM));
  const StopSignals again;
  EXPECT_EQ(StopSignals::received(), 0);
}

TEST(StopSignals, EachKindIsTakenFromTheProcessAndFromTheThread) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    {
      const StopSignals signals;
      send(signal);
    }
    const StopSignals signals;
    std::raise(signal);
    EXPECT_EQ(StopSignals::received(), signal);
  }
}

/// A call that is not begun anew after a signal's handler.
TEST(StopSignals, InterruptNoThreadThatHasThem) {
  const StopSignals signals("stopping soon\n");
  ::testing::internal::CaptureStderr();
  std::thread sender([] {
    for (int i = 0; i < 20; ++i) {
      ::usleep(1000);
      ::kill(::getpid(), SIGTERM);
    }
  });
  EXPECT_EQ(::poll(nullptr, 0, 60), 0) << "the thread that waits took none";
  sender.join();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "stopping soon\n") << "before anybody asked";
}

TEST(StopSignals, ASecondOneEndsTheProgramUnlessItIsTheSameRequest) {
  const auto stop = [] {
    const StopSignals signals("stopping soon\n");
    send(SIGINT);
    send(SIGINT);  // by a launcher that passes on what the terminal has delivered too
    ::usleep(1'100'000);
    ::kill(::getpid(), SIGINT);
    ::usleep(10'000'000);  // as where a step hangs
  };
  EXPECT_EXIT(stop(), ::testing::KilledBySignal(SIGINT), "^stopping soon\n$");
}

TEST(StopSignals, TellTheMessageOfTheFirst) {
  const StopSignals first("stopping soon\n");
  const StopSignals second("never told\n");
  ::testing::internal::CaptureStderr();
  send(SIGINT);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "stopping soon\n");
  EXPECT_NE(handler_of(SIGTERM), SIG_DFL) << "each kind is taken once";
  ::testing::internal::CaptureStderr();
  send(SIGTERM);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "stopping soon\n");
}

TEST(StopSignals, AnswerAnInquiryForEachRankAndStopNothing) {
  std::atomic<int> first{0}, second{0};
  const auto ask = [&](int answers) {
    ::kill(::getpid(), SIGUSR2);
    for (int waited = 0; first < answers && waited < 5000; ++waited) ::usleep(1000);
    EXPECT_EQ(first, answers);
  };
  const Handler before = handler_of(SIGUSR2);
  {
    const StopSignals one("", [&] { ++first; });
    {
      const StopSignals other("never told\n", [&] { ++second; });
      EXPECT_TRUE(is_blocked(SIGUSR2));
      ask(1);
      for (int waited = 0; second < 1 && waited < 5000; ++waited) ::usleep(1000);
    }
    ask(2);
    std::raise(SIGUSR2);
    EXPECT_EQ(StopSignals::received(), 0) << "it asks nobody to stop";
    EXPECT_EQ(first, 3);
    // A library's thread, which blocks nothing, has it taken to one that may answer.
    std::thread other([] {
      sigset_t usr2;
      ::sigemptyset(&usr2), ::sigaddset(&usr2, SIGUSR2);
      ::pthread_sigmask(SIG_UNBLOCK, &usr2, nullptr);
      std::raise(SIGUSR2);
    });
    other.join();
    for (int waited = 0; first < 4 && waited < 5000; ++waited) ::usleep(1000);
    EXPECT_EQ(first, 4);
  }
  EXPECT_EQ(second, 1);
  EXPECT_EQ(handler_of(SIGUSR2), before);
  EXPECT_FALSE(is_blocked(SIGUSR2));
}

TEST(StopSignals, LetInquiriesPassBeforeAndAfter) {
  struct sigaction before = action_of(SIGUSR2);
  std::signal(SIGUSR2, SIG_DFL);
  StopSignals::let_inquiries_pass();
  std::raise(SIGUSR2);
  EXPECT_TRUE(action_of(SIGUSR2).sa_flags & SA_ONSTACK);
  EXPECT_TRUE(action_of(SIGUSR2).sa_flags & SA_RESTART);
  std::atomic<int> answers{0};
  {
    const StopSignals signals("", [&] { ++answers; });
    std::raise(SIGUSR2);
    EXPECT_EQ(StopSignals::received(), 0);
    EXPECT_EQ(answers, 1);
  }
  std::raise(SIGUSR2);
  std::signal(SIGUSR2, SIG_IGN);
  StopSignals::let_inquiries_pass();
  EXPECT_EQ(handler_of(SIGUSR2), SIG_IGN) << "nobody asks";
  const Handler own = [](int) {};
  std::signal(SIGUSR2, own);
  StopSignals::let_inquiries_pass();
  EXPECT_EQ(handler_of(SIGUSR2), own);
  ::sigaction(SIGUSR2, &before, nullptr);
}

TEST(StopSignals, HoldNobodyUpWhereOneAsksFasterThanIsAnswered) {
  int answers = 0;
  const StopSignals signals("", [&] {
    if (++answers < 100) std::raise(SIGUSR2);
  });
  std::raise(SIGUSR2);
  for (const int answered : {1, 2}) {
    EXPECT_EQ(StopSignals::received(), 0);
    EXPECT_EQ(answers, answered);
  }
}

TEST(StopSignals, LeaveAProgramsOwnHandlerOfInquiries) {
  static std::atomic<int> own{0};
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) { ++own; };
  ::sigaction(SIGUSR2, &action, &before);
  {
    const StopSignals signals("", [] { ADD_FAILURE() << "the program answers itself"; });
    std::raise(SIGUSR2);
    EXPECT_EQ(StopSignals::received(), 0);
  }
  EXPECT_EQ(own, 1);
  ::sigaction(SIGUSR2, &before, nullptr);
}

/// Libraries' threads, begun before, block nothing.
TEST(StopSignals, ComeToOtherThreadsOnTheirAlternateStacks) {
  const StopSignals signals;
  EXPECT_TRUE(action_of(SIGTERM).sa_flags & SA_RESTART);
  BorrowedStack stack;
  std::thread other;
  {
    const StopSignals::Lifted lifted;
    other = std::thread([&] {
      ensure_signal_stack();
      BorrowedStack::possible ? stack.spin() : void(std::raise(SIGTERM));
    });
  }
  while (BorrowedStack::possible && !stack.on()) std::this_thread::yield();
  if (BorrowedStack::possible) stack.bombard(SIGTERM, 50);
  stack.stop();
  other.join();
  EXPECT_EQ(StopSignals::received(), SIGTERM);
  EXPECT_TRUE(stack.untouched());
}

TEST(StopSignals, LeaveErrnoToWhomTheyInterrupt) {
  const StopSignals signals("nobody reads this\n");
  const StopSignals::Lifted lifted;
  const int kept = ::dup(STDERR_FILENO);
  ::close(STDERR_FILENO);
  errno = ENOENT;
  std::raise(SIGTERM);
  const int after = errno;
  ::dup2(kept, STDERR_FILENO);
  ::close(kept);
  EXPECT_EQ(StopSignals::received(), SIGTERM);
  EXPECT_EQ(after, ENOENT);
}

/// Standard error is a pipe that takes nothing more, so that the thread that waits hangs in its message until
/// the signals are to go. Returns the signal that came last. In a process without threads of others, which
/// might take a signal.
int go_while_one_is_pending() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return -1;
  std::vector<char> bytes(static_cast<std::size_t>(::fcntl(ends[1], F_SETPIPE_SZ, 4096)));
  [[maybe_unused]] const ssize_t filled = ::write(ends[1], bytes.data(), bytes.size());
  ::dup2(ends[1], STDERR_FILENO);
  std::thread reader;
  {
    const StopSignals signals("stopping soon\n");
    ::kill(::getpid(), SIGINT);
    ::usleep(10'000);
    ::kill(::getpid(), SIGTERM);
    reader = std::thread([&] {
      ::usleep(30'000);
      [[maybe_unused]] const ssize_t emptied = ::read(ends[0], bytes.data(), bytes.size());
    });
  }
  reader.join();
  return StopSignals::received();
}

TEST(StopSignals, AreNotLostWhileTheyGo) {
  EXPECT_EXIT(std::_Exit(go_while_one_is_pending()), ::testing::ExitedWithCode(SIGTERM), "");
}

TEST(StopSignals, StayIgnoredWhereTheyWere) {
  const Handler before = std::signal(SIGHUP, SIG_IGN);
  {
    const StopSignals signals;
    ::kill(::getpid(), SIGHUP);
    std::raise(SIGHUP);
    ::usleep(5000);
    EXPECT_EQ(StopSignals::received(), 0);
  }
  EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
  std::signal(SIGHUP, before);
}

TEST(StopSignals, StayTheProgramsWhereItBlocksThemOrUsesSigusr1) {
  const sherd::testing::IdleHandler own(SIGUSR1, 0);
  sigset_t one;
  ::sigemptyset(&one);
  ::sigaddset(&one, SIGTERM);
  const SignalMask blocked(SIG_BLOCK, one);  // by a program that waits for it
  {
    const StopSignals signals;
    std::raise(SIGUSR1);
    std::raise(SIGTERM);
    EXPECT_EQ(StopSignals::received(), 0);
  }
  const timespec second{1, 0};
  EXPECT_EQ(::sigtimedwait(&one, nullptr, &second), SIGTERM);
}

/// system() and the like give programs what the thread has; fork() is told apart.
TEST(StopSignals, StopProgramsThatAreStartedMeanwhile) {
  const StopSignals signals;
  {
    const StopSignals::Lifted lifted;
    const int status = std::system("kill -s TERM $$");
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  }
  EXPECT_TRUE(is_blocked(SIGTERM));
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl("/bin/sh", "sh", "-c", "kill -s TERM $$", nullptr);
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  EXPECT_EQ(StopSignals::received(), 0);
}

/// Not with a lock that a thread held which is not there.
TEST(StopSignals, BeginInAChildWhateverAnotherThreadIsAt) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer has no threads in a child of several";
#endif
  std::atomic<bool> enough = false;
  std::thread other([&] {
    while (!enough) const StopSignals signals;
  });
  int ended = 0, status = 0;
  for (int i = 0; i < 100; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      { const StopSignals signals; }
      ::_exit(0);
    }
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) ++ended;
    if (ended <= i) break;
  }
  enough = true;
  other.join();
  EXPECT_EQ(ended, 100) << "the last child ended by " << ::strsignal(WTERMSIG(status));
}

TEST(StopSignals, LetAProgramAndAChildEndWithoutThem) {
  EXPECT_EXIT(
      {
        [[maybe_unused]] static const auto* const signals = new StopSignals;
        std::exit(3);
      },
      ::testing::ExitedWithCode(3), "");
  std::optional<StopSignals> signals(std::in_place);
  EXPECT_EXIT(
      {
        signals.reset();  // whose thread is the parent's
        std::_Exit(4);
      },
      ::testing::ExitedWithCode(4), "");
}

}  // namespace
}  // namespace sherd::engine

#include "engine/stop_signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace sherd::engine {
namespace {

using Handler = void (*)(int);

Handler handler_of(int signal) {
  struct sigaction now {};
  ::sigaction(signal, nullptr, &now);
  return now.sa_handler;
}

TEST(StopSignals, AreTakenOnceAndGivenBackByTheLast) {
  const Handler before = handler_of(SIGTERM);
  {
    const StopSignals first;
    EXPECT_EQ(StopSignals::received(), 0);
    { const StopSignals second; }
    std::raise(SIGTERM);
    EXPECT_EQ(StopSignals::received(), SIGTERM);
  }
  EXPECT_EQ(handler_of(SIGTERM), before);
  const StopSignals again;
  EXPECT_EQ(StopSignals::received(), 0);
}

TEST(StopSignals, ASecondOneEndsTheProgramUnlessItIsTheSameRequest) {
  const StopSignals signals("stopping soon\n");
  ::testing::internal::CaptureStderr();
  std::raise(SIGINT);
  std::raise(SIGINT);  // by a launcher that passes on what the terminal has delivered too
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "stopping soon\n");
  EXPECT_EQ(StopSignals::received(), SIGINT);
  EXPECT_EXIT(
      {
        ::usleep(1'100'000);
        std::raise(SIGINT);
      },
      ::testing::KilledBySignal(SIGINT), "");
}

TEST(StopSignals, TellTheMessageOfTheFirst) {
  const StopSignals first("stopping soon\n");
  const StopSignals second("never told\n");
  ::testing::internal::CaptureStderr();
  std::raise(SIGINT);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "stopping soon\n");
  EXPECT_NE(handler_of(SIGTERM), SIG_DFL) << "each kind is taken once";
  ::testing::internal::CaptureStderr();
  std::raise(SIGTERM);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "stopping soon\n");
}

TEST(StopSignals, LeaveErrnoToWhomTheyInterrupt) {
  const StopSignals signals("nobody reads this\n");
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

TEST(StopSignals, StayIgnoredWhereTheyWere) {
  const Handler before = std::signal(SIGHUP, SIG_IGN);
  {
    const StopSignals signals;
    std::raise(SIGHUP);
    EXPECT_EQ(StopSignals::received(), 0);
  }
  EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
  std::signal(SIGHUP, before);
}

}  // namespace
}  // namespace sherd::engine

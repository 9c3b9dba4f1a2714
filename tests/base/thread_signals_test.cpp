#include "base/threads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "base/arena.h"
#include "support/borrowed_stack.h"

namespace sherd {
namespace {

using testing::BorrowedStack;
using testing::IdleHandler;

/// Signals to a thread that `start` has spin on a borrowed stack, from the calling thread.
bool stays_untouched(const std::function<std::thread(BorrowedStack&)>& start) {
  const IdleHandler handler(SIGPROF, SA_ONSTACK | SA_RESTART);
  BorrowedStack stack;
  std::thread thread = start(stack);
  while (!stack.on()) std::this_thread::yield();
  stack.bombard(SIGPROF, 50);
  stack.stop();
  thread.join();
  return stack.untouched();
}

bool is_blocked(int signal) {
  sigset_t now;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &now);
  return ::sigismember(&now, signal) == 1;
}

TEST(ThreadSignals, WithoutAnAlternateStackASignalOverwritesWhatTheStackPointerPointsTo) {
  if (!BorrowedStack::possible) GTEST_SKIP() << "for x86 alone";
  EXPECT_FALSE(stays_untouched([](BorrowedStack& stack) {
    return std::thread([&] {
      stack_t none{nullptr, SS_DISABLE, 0}, before{};
      ::sigaltstack(&none, &before);
      stack.spin();
      ::sigaltstack(&before, nullptr);
    });
  })) << "the other tests see nothing either";
}

TEST(ThreadSignals, OwnThreadsAndCallersHaveAnAlternateStack) {
  if (!BorrowedStack::possible) GTEST_SKIP() << "for x86 alone";
  EXPECT_TRUE(
      stays_untouched([](BorrowedStack& stack) { return std::thread(own_thread([&] { stack.spin(); })); }));
  EXPECT_TRUE(stays_untouched([](BorrowedStack& stack) {
    return std::thread([&] {
      ensure_signal_stack();
      stack.spin();
    });
  }));
}

TEST(ThreadSignals, WhoeverMakesAnArenaHasAnAlternateStack) {
  if (!BorrowedStack::possible) GTEST_SKIP() << "for x86 alone";
  EXPECT_TRUE(stays_untouched([](BorrowedStack& stack) {
    return std::thread([&] {
      const Arena arena(1);
      stack.spin();
    });
  }));
}

/// Both of an arena's threads take a chunk: neither comes back from its own.
TEST(ThreadSignals, AllThreadsOfAnArenaHaveAnAlternateStack) {
  if (!BorrowedStack::possible) GTEST_SKIP() << "for x86 alone";
  const IdleHandler handler(SIGPROF, SA_ONSTACK | SA_RESTART);
  BorrowedStack stacks[2];
  std::thread computing([&] {
    Arena arena(2);
    arena.parallel_for(2, 1, [&](std::int64_t chunk, std::int64_t) { stacks[chunk].spin(); });
  });
  for (BorrowedStack& stack : stacks) {
    while (!stack.on()) std::this_thread::yield();
    stack.bombard(SIGPROF, 50);
  }
  for (BorrowedStack& stack : stacks) stack.stop();
  computing.join();
  for (const BorrowedStack& stack : stacks) EXPECT_TRUE(stack.untouched());
}

TEST(ThreadSignals, AStackThatAThreadHasStays) {
  std::thread([] {
    std::vector<std::byte> own(static_cast<std::size_t>(SIGSTKSZ) * 4);
    stack_t mine{own.data(), 0, own.size()}, before{}, now{};
    ::sigaltstack(&mine, &before);
    ensure_signal_stack();
    ::sigaltstack(&before, &now);
    EXPECT_EQ(now.ss_sp, own.data());
  }).join();
}

TEST(ThreadSignals, StopSignalsDoNotComeToOwnThreads) {
  std::thread(own_thread([] {
    for (const int signal : stop_signals) EXPECT_TRUE(is_blocked(signal)) << signal;
    EXPECT_FALSE(is_blocked(SIGPROF));
  })).join();
  Arena arena(2);
  const auto caller = std::this_thread::get_id();
  arena.parallel_for(64, 1, [&](std::int64_t, std::int64_t) {
    EXPECT_EQ(is_blocked(SIGTERM), std::this_thread::get_id() != caller);
  });
}

TEST(ThreadSignals, AMaskPutsBackWhatItChanged) {
  std::thread([] {
    sigset_t one;
    ::sigemptyset(&one);
    ::sigaddset(&one, SIGHUP);
    const SignalMask outer(SIG_BLOCK, one);
    {
      const SignalMask all(SIG_BLOCK, stop_signal_set());
      EXPECT_TRUE(is_blocked(SIGINT) && is_blocked(SIGHUP));
      {
        const SignalMask none(SIG_UNBLOCK, stop_signal_set());
        EXPECT_FALSE(is_blocked(SIGINT) || is_blocked(SIGHUP));
      }
      EXPECT_TRUE(is_blocked(SIGINT) && is_blocked(SIGHUP));
    }
    EXPECT_FALSE(is_blocked(SIGINT));
    EXPECT_TRUE(is_blocked(SIGHUP));
  }).join();
}

TEST(ThreadSignals, HandlersOnThreadsStacksAreToldOnce) {
  const IdleHandler profiler(SIGPROF, SA_RESTART), timer(SIGVTALRM, SA_ONSTACK), own(SIGPIPE, 0),
      unnamed(SIGRTMIN + 3, 0);
  ::testing::internal::CaptureStderr();
  warn_of_handlers_on_threads_stacks();
  warn_of_handlers_on_threads_stacks();
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, ::testing::HasSubstr("warning: the handler of SIGPROF was installed without SA_ONSTACK"));
  EXPECT_THAT(said, ::testing::HasSubstr("handler of signal 37 was"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 2) << said;
}

}  // namespace
}  // namespace sherd

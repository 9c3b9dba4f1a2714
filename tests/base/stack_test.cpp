#include "base/threads.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/error.h"

namespace sherd {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_SANITIZERS() GTEST_SKIP() << "sanitizers take stacks of their own"
#else
#define SKIP_UNDER_SANITIZERS()
#endif

void limit_stack(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  if (::setrlimit(RLIMIT_STACK, &limit) != 0) std::abort();
}

std::size_t stack_of_a_new_thread() {
  std::size_t bytes = 0;
  std::thread([&] {
    pthread_attr_t attributes;
    ::pthread_getattr_np(::pthread_self(), &attributes);
    ::pthread_attr_getstacksize(&attributes, &bytes);
    ::pthread_attr_destroy(&attributes);
  }).join();
  return bytes;
}

[[noreturn]] void exit_with_what_it_says() {
  try {
    require_stack();
  } catch (const Error& error) {
    std::fputs(error.what(), stderr);
    std::exit(error.kind() == ErrorKind::memory ? 3 : 4);
  }
  std::exit(0);
}

TEST(StackDeathTest, TooLowALimitIsAnErrorThatNamesIt) {
  SKIP_UNDER_SANITIZERS();
  const auto limited = [] {
    limit_stack(128 << 10, 128 << 10);
    exit_with_what_it_says();
  };
  EXPECT_EXIT(limited(), ::testing::ExitedWithCode(3),
              "limited to 128 KiB, and Sherd needs 512 KiB.*ulimit -s");
}

TEST(StackDeathTest, ALowLimitIsRaisedAsFarAsItMayBe) {
  SKIP_UNDER_SANITIZERS();
  const auto limited = [] {
    limit_stack(128 << 10, 1 << 20);
    require_stack();
    rlimit limit{};
    ::getrlimit(RLIMIT_STACK, &limit);
    std::exit(limit.rlim_cur == 1 << 20 ? 0 : 1);
  };
  EXPECT_EXIT(limited(), ::testing::ExitedWithCode(0), "");
}

TEST(StackDeathTest, ThreadsGetEnoughEvenSo) {
  SKIP_UNDER_SANITIZERS();
  const auto started_with_little = [] {
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, 128 << 10);
    ::pthread_setattr_default_np(&attributes);  // as `ulimit -s 128` before the start
    if (stack_of_a_new_thread() > 256 << 10) std::exit(2);
    require_stack();
    std::exit(stack_of_a_new_thread() >= 2 << 20 ? 0 : 1);
  };
  EXPECT_EXIT(started_with_little(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace sherd

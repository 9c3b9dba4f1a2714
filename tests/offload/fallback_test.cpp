#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iostream>

#include "base/error.h"
#include "offload/store_fixture.h"
#include "support/forbid.h"

namespace sherd::offload {
namespace {

using device::Category;
using sherd::testing::cannot_test;
using sherd::testing::expect_in_child;
using sherd::testing::forbid;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// In a child process, where system calls can be forbidden for good.
class FallbackTest : public StoreFixture {
 protected:
  /// Transfers through a store as it is then; says on stderr how it went. Ends the process.
  [[noreturn]] void report() {
    try {
      Store store(options, ledger);
      const Pages buffer = store.pages(300'000, Category::optimizer),
                  other = store.pages(5000, Category::optimizer);
      const Span span = store.reserve("s", 300'000, Category::optimizer);
      const auto data = pattern(300'000, 2);
      store.write(span, 0, data.data(), data.size()).wait();
      store.read(span, 0, buffer.data(), 300'000).wait();
      const bool right =
          std::equal(data.begin(), data.end(), reinterpret_cast<unsigned char*>(buffer.data()));
      std::cerr << "backend: " << store.backend_name() << (buffer.registered() ? ", registered" : ", plain")
                << (right ? ", right\n" : ", wrong\n");
    } catch (const std::exception& error) {
      std::cerr << "error: " << error.what() << "\n";
    }
    std::_Exit(0);
  }
};

/// How often `part` occurs.
MATCHER_P2(Has, times, part, "") {
  int count = 0;
  const std::string text = arg, wanted = part;
  for (auto at = text.find(wanted); at != std::string::npos; at = text.find(wanted, at + 1)) ++count;
  return count == times;
}

TEST_F(FallbackTest, nothing_refused_is_nothing_logged) {
  if (!uring_works()) GTEST_SKIP() << "no io_uring here";
  expect_in_child([&] { report(); },
                  AllOf(HasSubstr("backend: io_uring, registered, right"), Not(HasSubstr("sherd:"))));
}

TEST_F(FallbackTest, threads_stand_in_where_io_uring_cannot_be_used_here) {
  std::string why;
  if (make_uring_backend(options, &why)) GTEST_SKIP() << "io_uring works here";
  expect_in_child([&] { report(); }, AllOf(Has(1, "sherd:"), HasSubstr("io_uring cannot be used (" + why),
                                           HasSubstr("backend: threads, plain, right")));
}

TEST_F(FallbackTest, threads_stand_in_where_io_uring_is_refused) {
  if (!uring_works()) GTEST_SKIP() << "no io_uring here";
  const auto refused = [&](unsigned error) {
    if (!forbid(SYS_io_uring_setup, error)) cannot_test();
    report();
  };
  expect_in_child([&] { refused(EPERM); },
                  AllOf(Has(1, "sherd:"), HasSubstr("io_uring cannot be used (the kernel forbids it"),
                        HasSubstr("reading and writing with 2 threads instead"),
                        HasSubstr("backend: threads, plain, right")));
  expect_in_child([&] { refused(ENOSYS); }, AllOf(Has(1, "sherd:"), HasSubstr("the kernel lacks it"),
                                                  HasSubstr("backend: threads, plain, right")));
  options.backend = StoreOptions::Backend::io_uring;
  expect_in_child([&] { refused(EPERM); },
                  HasSubstr("error: io_uring was asked for and cannot be used: the kernel forbids it"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "a store that was not made left files";
}

TEST_F(FallbackTest, the_page_cache_stands_in_where_direct_io_is_refused) {
  const auto refused = [&] {
    if (!forbid(SYS_openat, EINVAL, 2, O_DIRECT)) cannot_test();
    report();
  };
  expect_in_child(refused, AllOf(Has(1, "sherd:"), HasSubstr("refuses O_DIRECT"),
                                 HasSubstr("backend: threads, buffered, plain, right")));
}

TEST_F(FallbackTest, direct_reads_that_fail_are_found_at_the_start) {
  const auto refused = [&] {
    // The first pread64 is the probe's; with threads out of the way nothing else calls it.
    options.backend = StoreOptions::Backend::io_uring;
    if (!uring_works() || !forbid(SYS_pread64, EINVAL)) cannot_test();
    report();
  };
  if (!uring_works()) GTEST_SKIP() << "no io_uring here";
  expect_in_child(refused, AllOf(HasSubstr("refuses O_DIRECT"), HasSubstr("backend: io_uring, buffered"),
                                 HasSubstr("right")));
}

TEST_F(FallbackTest, plain_buffers_stand_in_where_memory_may_not_be_locked) {
  if (!uring_works()) GTEST_SKIP() << "no io_uring here";
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);
  const auto refused = [&] {
    const rlimit none{16384, 16384};
    // Root may lock any amount, so it becomes nobody.
    if (::setrlimit(RLIMIT_MEMLOCK, &none) != 0) cannot_test();
    if (::geteuid() == 0 && (::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0))
      cannot_test();
    if (!uring_works()) cannot_test();
    report();
  };
  expect_in_child(
      refused, AllOf(Has(1, "sherd:"), HasSubstr("does not register transfer buffers (the limit of locked"),
                     HasSubstr("backend: io_uring, plain, right")));
}

}  // namespace
}  // namespace sherd::offload

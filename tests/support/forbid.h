#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <iterator>

namespace sherd::testing {

inline constexpr const char* cannot_forbid = "this system does not let a test forbid that";

/// From here on the kernel refuses system call `number` of this thread, and of those it starts, with `error`,
/// or only those whose argument `argument` has one of `bits`. False where the system does not let us.
inline bool forbid(unsigned number, unsigned error, unsigned argument = 0, unsigned bits = 0) {
  const auto argument_at = static_cast<unsigned>(offsetof(seccomp_data, args)) + 8 * argument;
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument_at),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  if (bits == 0) program[1].jt = 2;  // whatever the argument
  sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

inline constexpr int gave_up_code = 77;

/// Ends a child process of expect_in_child() that could not forbid what it wanted to.
[[noreturn]] inline void cannot_test() {
  std::_Exit(gave_up_code);
}

/// Runs `body` in a child process, which it ends: with 0, having said on stderr what `matcher` wants. Marks
/// the test as skipped where the child gave up.
template <class Body, class Matcher>
void expect_in_child(const Body& body, const Matcher& matcher) {
  bool gave_up = false;
  const auto ended = [&](int status) {
    gave_up = WIFEXITED(status) && WEXITSTATUS(status) == gave_up_code;
    return gave_up || status == 0;
  };
  const auto said = [&](const std::string& text) { return gave_up || ::testing::Matches(matcher)(text); };
  EXPECT_EXIT(body(), ended, ::testing::Truly(said)) << ::testing::DescribeMatcher<std::string>(matcher);
  if (gave_up) GTEST_SKIP() << cannot_forbid;
}

}  // namespace sherd::testing

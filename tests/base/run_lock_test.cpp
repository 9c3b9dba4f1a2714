#include "base/run_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstdlib>
#include <optional>

#include "base/error.h"
#include "support/expect_error.h"
#include "support/forbid.h"
#include "support/temp_folder.h"

namespace sherd {
namespace {

namespace fs = std::filesystem;
using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::HasSubstr;

/// That another process is refused, and a dead one followed, is tested where locks are used.
TEST(RunLock, IsHeldOnceAndLeavesTheFolder) {
  TempFolder folder;
  const LockUse use{folder / "thing", "user", "another place"};
  std::optional<RunLock> first(std::in_place, folder / "deep/lock", use);
  EXPECT_TRUE(first->held());
  expect_error(ErrorKind::io,
               cat("'", (folder / "thing").string(),
                   "' is in use by another user of this process: give each of them another place"),
               [&] { RunLock(folder / "deep/lock", use); });
  first->remove();
  EXPECT_FALSE(first->held());
  EXPECT_TRUE(fs::is_empty(folder / "deep"));
  EXPECT_TRUE(RunLock(folder / "deep/lock", use).held());
}

TEST(RunLock, TellsWhoHeldItBefore) {
  TempFolder folder;
  write_text(folder / "lock", "process 17 on host a, started then\nand more");
  const RunLock lock(folder / "lock", {folder.path(), "user", "another place"});
  EXPECT_EQ(lock.predecessor(), "process 17 on host a, started then");
  EXPECT_THAT(read_text(folder / "lock"), HasSubstr(cat("process ", ::getpid(), " on host ")));
}

TEST(RunLock, AFileSystemWithoutLocksIsAnErrorOrAWarning) {
  TempFolder folder;
  const auto locks = [&] {
    if (!sherd::testing::forbid(SYS_flock, ENOSYS)) sherd::testing::cannot_test();
    expect_error(ErrorKind::io, "cannot lock", [&] {
      RunLock(folder / "lock", {folder.path(), "user", "another place"});
    });
    const RunLock lock(folder / "lock", {folder.path(), "user", "another place", false});
    std::_Exit(!lock.held() && !HasFailure() ? 0 : 1);
  };
  sherd::testing::expect_in_child(locks, HasSubstr("has no locks"));
}

}  // namespace
}  // namespace sherd

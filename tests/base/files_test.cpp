#include "base/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd {
namespace {

namespace fs = std::filesystem;
using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

TEST(AtomicFile, AppearsOnlyWhenCommitted) {
  TempFolder folder;
  write_text(folder / "a", "old");
  AtomicFile file(folder / "a");
  file.write("new ", 4);
  file.write("text", 4);
  EXPECT_EQ(read_text(folder / "a"), "old");
  file.commit();
  EXPECT_EQ(read_text(folder / "a"), "new text");
  EXPECT_FALSE(fs::exists(folder / "a.partial"));
  expect_error(ErrorKind::usage, "complete", [&] { file.write("x", 1); });
}

TEST(AtomicFile, LeavesNothingWhenDropped) {
  TempFolder folder;
  {
    AtomicFile file(folder / "a");
    file.write("half", 4);
    AtomicFile moved(std::move(file));
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(AtomicFile, ReplacesThePartialFileOfACrash) {
  TempFolder folder;
  write_text(folder / "a.partial", "a longer remnant of an earlier run");
  write_file_atomically(folder / "a", "short");
  EXPECT_EQ(read_text(folder / "a"), "short");
}

TEST(AtomicFile, WritesAnywhereInReservedSpace) {
  TempFolder folder;
  AtomicFile file(folder / "a");
  file.reserve(8);
  file.write_at(5, "xyz", 3);
  file.write_at(0, "abcde", 5);
  file.commit();
  EXPECT_EQ(read_text(folder / "a"), "abcdexyz");
}

TEST(AtomicFile, NamesTheFileAndTheReason) {
  TempFolder folder;
  expect_error(ErrorKind::io, "no/such/folder': No such file or directory. Create the folder first",
               [&] { AtomicFile file(folder / "no/such/folder"); });
  fs::create_directory(folder / "taken");
  write_text(folder / "taken/inside", "");
  expect_error(ErrorKind::io, "taken", [&] { write_file_atomically(folder / "taken", "x"); });
  EXPECT_FALSE(fs::exists(folder / "taken.partial"));
}

TEST(AtomicFile, FullDiskIsAnErrorAndKeepsTheOldFile) {
  TempFolder folder;
  write_text(folder / "a", "old");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit tight{4096, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
  std::vector<char> big(8192, 'x');
  expect_error(ErrorKind::io, "reserve 8192 bytes", [&] { AtomicFile(folder / "a").reserve(8192); });
  expect_error(ErrorKind::io, "cannot write",
               [&] { AtomicFile(folder / "a").write(big.data(), big.size()); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_text(folder / "a"), "old");
  EXPECT_FALSE(fs::exists(folder / "a.partial"));
}

TEST(PublishFolder, RenamesButNeverReplaces) {
  TempFolder folder;
  fs::create_directory(folder / "step5.partial");
  write_text(folder / "step5.partial/x", "1");
  publish_folder(folder / "step5.partial", folder / "step5");
  EXPECT_EQ(read_text(folder / "step5/x"), "1");
  fs::create_directory(folder / "again");
  expect_error(ErrorKind::io, "exists", [&] { publish_folder(folder / "again", folder / "step5"); });
  expect_error(ErrorKind::io, "missing", [&] { publish_folder(folder / "missing", folder / "step6"); });
}

TEST(AtomicFile, ALinkIsFollowedAndStays) {
  TempFolder folder;
  write_text(folder / "target", "old");
  std::filesystem::create_symlink("target", folder / "link");
  write_file_atomically(folder / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "target"), "new");
}

TEST(AtomicFile, WhatIsNoFileIsWrittenToAndStays) {
  TempFolder folder;
  const std::string pipe = (folder / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  write_file_atomically(pipe, "through");
  char got[8] = {};
  EXPECT_EQ(::read(reader, got, sizeof got), 7);
  EXPECT_STREQ(got, "through");
  ::close(reader);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  expect_error(ErrorKind::io, "No space left", [] { write_file_atomically("/dev/full", "lost"); });
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
}

}  // namespace
}  // namespace sherd

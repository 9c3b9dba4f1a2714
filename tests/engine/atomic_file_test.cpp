#include "engine/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "engine/crc32c.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::engine {
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
  expect_error(ErrorKind::io, "No such file", [&] { AtomicFile file(folder / "no/such/folder"); });
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
  expect_error(ErrorKind::io, "cannot write", [&] { AtomicFile(folder / "a").write(big.data(), big.size()); });
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

// Check values: RFC 3720 appendix B.4 and the catalogue of parametrised CRC algorithms.
TEST(Crc32c, MatchesPublishedValues) {
  const std::string digits = "123456789";
  const std::string zeros(32, '\0'), ones(32, '\xff');
  for (auto* crc : {&crc32c, &crc32c_portable}) {
    EXPECT_EQ(crc(digits.data(), digits.size(), 0), 0xe3069283u);
    EXPECT_EQ(crc(zeros.data(), zeros.size(), 0), 0x8a9136aau);
    EXPECT_EQ(crc(ones.data(), ones.size(), 0), 0x62a8ab43u);
    EXPECT_EQ(crc(nullptr, 0, 0), 0u);
  }
}

TEST(Crc32c, BothWaysAgreeForEverySplit) {
  std::vector<unsigned char> data(67);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * i + 7);
  const std::uint32_t whole = crc32c(data.data(), data.size());
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    EXPECT_EQ(crc32c(data.data() + cut, data.size() - cut, crc32c(data.data(), cut)), whole);
    EXPECT_EQ(crc32c_portable(data.data() + cut, data.size() - cut, crc32c_portable(data.data(), cut)), whole);
  }
}

TEST(ChecksumFile, SeesEveryByte) {
  TempFolder folder;
  std::string content((1 << 20) + 4097, 'a');
  write_text(folder / "a", content);
  const FileChecksum before = checksum_file(folder / "a");
  EXPECT_EQ(before.bytes, content.size());
  EXPECT_EQ(before.crc32c, crc32c(content.data(), content.size()));
  content[(1 << 20) + 1] ^= 1;
  write_text(folder / "a", content);
  EXPECT_NE(checksum_file(folder / "a"), before);
  expect_error(ErrorKind::io, "cannot open", [&] { checksum_file(folder / "none"); });
}

}  // namespace
}  // namespace sherd::engine

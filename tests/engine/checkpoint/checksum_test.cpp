#include "engine/checkpoint/format.h"

#include <gtest/gtest.h>

#include <string>

#include "base/crc32c.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

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

#include "data/text/input_stream.h"

#include <gtest/gtest.h>

#include "data/prepare.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::read_text;
using testing::TempFolder;
using testing::write_text;

using namespace std::string_literals;

// printf 'one\n\ntwo' > p1; printf '\n\nthree' > p2; (gzip -nc p1; gzip -nc p2); (zstd -qc p1; zstd -qc p2)
const std::string gzip_file =
    "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xcb\xcf\x4b\xe5\xe2\x2a\x29\xcf\x07\x00\x9e\x6f\xdf\x24"s +
    "\x08\x00\x00\x00\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xe3\xe2\x2a\xc9\x28\x4a\x4d\x05\x00\xbe"s +
    "\x8c\x60\x18\x07\x00\x00\x00"s;
const std::string zstd_file =
    "\x28\xb5\x2f\xfd\x24\x08\x41\x00\x00\x6f\x6e\x65\x0a\x0a\x74\x77\x6f\x12\xab\x9b\x6a\x28\xb5\x2f"s +
    "\xfd\x24\x07\x39\x00\x00\x0a\x0a\x74\x68\x72\x65\x65\x37\x6c\xe4\xbc"s;
const std::string text = "one\n\ntwo\n\nthree";

std::string unpacked(const std::filesystem::path& path, std::size_t at_a_time) {
  InputStream in(path);
  std::string out, part(at_a_time, '\0');
  while (const std::size_t got = in.read(part.data(), part.size())) out.append(part, 0, got);
  EXPECT_EQ(in.bytes_read(), std::filesystem::file_size(path));
  return out;
}

TEST(InputStream, UnpacksWhatGzipAndZstdPacked) {
  const TempFolder folder;
  for (const std::string& bytes : {text, gzip_file, zstd_file}) {
    write_text(folder / "in", bytes);
    for (const std::size_t at_a_time : {1, 2, 5, 1000}) EXPECT_EQ(unpacked(folder / "in", at_a_time), text);
  }
  for (const std::string& tiny : {""s, "\x1f"s, "\x28\xb5\x2f"s}) {
    write_text(folder / "in", tiny);
    EXPECT_EQ(unpacked(folder / "in", 10), tiny);
  }
}

TEST(InputStream, NamesAFileThatIsCutOffOrDamaged) {
  const TempFolder folder;
  for (const auto& [bytes, format] : {std::pair{gzip_file, "gzip"}, std::pair{zstd_file, "zstd"}}) {
    const std::string file = (folder / format).string();
    for (std::size_t size = 5; size < bytes.size(); ++size) {
      write_text(file, bytes.substr(0, size));
      try {
        EXPECT_EQ(unpacked(file, 100), "one\n\ntwo") << size << ": whole up to the second member alone";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::data);
        EXPECT_NE(std::string(error.what()).find(file), std::string::npos) << error.what();
      }
    }
    write_text(file, bytes.substr(0, 10));
    expect_error(ErrorKind::data, "ends in the middle of its "s + format + " data",
                 [&] { unpacked(file, 100); });
    std::string damaged = bytes;
    damaged[damaged.size() / 2 - 6] = static_cast<char>(damaged[damaged.size() / 2 - 6] ^ 0x55);
    write_text(file, damaged);
    expect_error(ErrorKind::data, format + " data of '"s + file + "' are damaged",
                 [&] { unpacked(file, 100); });
    write_text(file, bytes + "garbage");
    expect_error(ErrorKind::data, "are damaged", [&] { unpacked(file, 100); });
  }
}

TEST(InputStream, PreparesPackedFilesAsUnpackedOnes) {
  const TempFolder folder;
  const auto prepared = [&](const std::string& name, const std::string& bytes) {
    write_text(folder / name, bytes);
    PrepareOptions options;
    options.inputs = {(folder / name).string()};
    options.output = (folder / "out").string();
    std::uint64_t done = 0;
    options.progress = [&](const PrepareProgress& progress) { done = progress.bytes_done; };
    EXPECT_EQ(prepare(options).info.documents, 3);
    EXPECT_EQ(done, bytes.size()) << "progress is of the file as it lies there";
    return read_text(folder / "out.bin");
  };
  const std::string expected = prepared("in.txt", text);
  EXPECT_EQ(prepared("in.txt.gz", gzip_file), expected);
  EXPECT_EQ(prepared("in.zst", zstd_file), expected);
}

}  // namespace
}  // namespace sherd::data

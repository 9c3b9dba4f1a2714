// Files of the format: the bytes of the gguf package, and rows in any order.
#include "models/gguf/gguf_file.h"

#include "gguf_reader.h"
#include "support/expect_error.h"
#include "support/places.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error, sherd::testing::read_text, sherd::testing::TempFolder;

std::string numbers(GgufType type, float first, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i);
  std::string out(bytes_of_row(type, std::ssize(values)), '\0');
  encode_gguf(type, values, std::as_writable_bytes(std::span(out)));
  return out;
}

GgufMetadata metadata() {
  GgufMetadata out;
  out.set("general.architecture", "llama");
  out.set("a.count", std::int64_t{7});
  out.set("a.number", GgufValue(std::int32_t{-3}));
  out.set("a.real", 0.5);
  out.set("a.flag", GgufValue(true));
  out.set("a.text", "Grüße");
  out.set("a.texts", std::vector<std::string>{"x", "", "yz"});
  out.set("a.reals", std::vector<float>{1.5f, -2.0f});
  out.set("a.numbers", std::vector<std::int32_t>{1, -1});
  out.set("a.flags", std::vector<bool>{true, false, true});
  return out;
}

const std::vector<GgufSpec> specs{{"first.weight", GgufType::f32, {3, 5}},
                                  {"second.bias", GgufType::f32, {3}},
                                  {"third.weight", GgufType::q8_0, {3, 32}}};

TEST(GgufFile, HasTheBytesOfTheGgufPackage) {
  const TempFolder folder;
  GgufWriter file(folder / "x.gguf", metadata(), specs);
  const auto write = [&](const char* name, std::int64_t row, const std::string& bytes) {
    file.write(name, row, std::as_bytes(std::span(bytes)));
  };
  write("third.weight", 1, numbers(GgufType::q8_0, 32, 64));
  write("second.bias", 0, numbers(GgufType::f32, 0, 3));
  EXPECT_FALSE(std::filesystem::exists(folder / "x.gguf"));
  write("first.weight", 0, numbers(GgufType::f32, 0, 15));
  write("third.weight", 0, numbers(GgufType::q8_0, 0, 32));
  const std::uint64_t bytes = file.finish();
  const std::string written = read_text(folder / "x.gguf");
  EXPECT_EQ(written.size(), bytes);
  EXPECT_TRUE(written == read_text(std::string(SHERD_SOURCE_DIR) + "/tests/models/gguf/reference/file.gguf"));
}

TEST(GgufFile, IsCompleteOrNotThere) {
  const TempFolder folder;
  {
    GgufWriter file(folder / "x.gguf", metadata(), specs);
    const std::string row = numbers(GgufType::f32, 0, 5);
    file.write("first.weight", 2, std::as_bytes(std::span(row)));
    expect_error(ErrorKind::usage, "first.weight has 20 bytes of 60", [&] { file.finish(); });
    expect_error(ErrorKind::usage, "does not have these rows",
                 [&] { file.write("first.weight", 3, std::as_bytes(std::span(row))); });
    expect_error(ErrorKind::usage, "no tensor fourth",
                 [&] { file.write("fourth", 0, std::as_bytes(std::span(row))); });
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  expect_error(ErrorKind::usage, "two tensors are named second.bias", [&] {
    GgufWriter(folder / "y.gguf", metadata(), {specs[1], specs[1]});
  });
  GgufMetadata twice = metadata();
  expect_error(ErrorKind::usage, "two values of a.flag", [&] { twice.set("a.flag", GgufValue(false)); });
}

}  // namespace
}  // namespace sherd::models

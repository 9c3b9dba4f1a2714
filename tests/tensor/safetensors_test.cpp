#include "tensor/safetensors/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <ctime>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::tensor {
namespace {

using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

std::string file_with(const std::string& header, const std::string& payload) {
  std::uint64_t length = header.size();
  std::string out(reinterpret_cast<const char*>(&length), 8);
  return out + header + payload;
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

class Safetensors : public ::testing::Test {
 protected:
  void expect_bad(const std::string& content, const std::string& part) {
    write_text(folder / "x.safetensors", content);
    expect_error(ErrorKind::data, part, [&] { SafetensorsFile file(folder / "x.safetensors"); });
  }
  void expect_bad_header(const std::string& header, const std::string& payload, const std::string& part) {
    expect_bad(file_with(header, payload), part);
  }
  TempFolder folder;
  std::shared_ptr<device::Device> device = device::make_cpu_device(1);
};

TEST_F(Safetensors, GivesBackWhatWasWritten) {
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  const Tensor a = Tensor::of<float>(*device, Shape{2, 3}, values);
  SafetensorsWriter writer(folder / "x",
                           {{"b", DType::u8, {3}},
                            {"a", DType::f32, {2, 3}},
                            {"empty", DType::bf16, {0, 4}},
                            {"scalar", DType::i64, {}}},
                           {{"format", "pt"}, {"note", "ü \"quoted\""}});
  writer.write("a", 2, a.range(2, 6));  // out of order and in parts
  writer.write("b", 0, bytes_of("xyz"));
  writer.write("a", 0, a.range(0, 2));
  writer.write("scalar", 0, bytes_of(std::string("\x2a\0\0\0\0\0\0\0", 8)));
  EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  writer.finish();

  SafetensorsFile file(folder / "x");
  EXPECT_EQ(file.metadata().at("note"), "ü \"quoted\"");
  ASSERT_EQ(file.entries().size(), 4u);
  EXPECT_EQ(file.at("a").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(file.at("scalar").numel(), 1);
  EXPECT_EQ(file.at("empty").numel(), 0);
  EXPECT_EQ(file.find("c"), nullptr);
  Tensor part = Tensor::zeros(*device, Shape{3}, DType::f32);
  file.read("a", 2, part);
  EXPECT_EQ(std::vector<float>(part.data<float>(), part.data<float>() + 3), (std::vector<float>{3, 4, 5}));
  std::string b(2, ' ');
  file.read_bytes(file.at("b"), 1, std::as_writable_bytes(std::span(b)));
  EXPECT_EQ(b, "yz");
  expect_error(ErrorKind::data, "3 bytes; [2, 4) reaches outside",
               [&] { file.read_bytes(file.at("b"), 2, std::as_writable_bytes(std::span(b))); });
}

// The bytes that Python's safetensors 0.4 writes for the same tensors.
TEST_F(Safetensors, LaysTensorsOutLikeTheReferenceWriter) {
  SafetensorsWriter writer(folder / "x", {{"z", DType::u8, {1}},
                                          {"b", DType::f32, {1}},
                                          {"a", DType::bf16, {2}},
                                          {"c", DType::i64, {1}},
                                          {"d", DType::f16, {1}}});
  writer.write("z", 0, bytes_of("z"));
  writer.write("b", 0, bytes_of("bbbb"));
  writer.write("a", 0, bytes_of("aaaa"));
  writer.write("c", 0, bytes_of("cccccccc"));
  writer.write("d", 0, bytes_of("dd"));
  writer.finish();
  const std::string content = read_text(folder / "x");
  EXPECT_EQ(content.substr(content.size() - 19), "ccccccccbbbbaaaaddz");
  const std::size_t header = content.size() - 19 - 8;
  EXPECT_EQ(header % 8, 0u);
  EXPECT_TRUE(content.substr(8).starts_with(R"({"c":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"b":)"));
}

TEST_F(Safetensors, WriterRefusesMistakes) {
  const std::vector<SafetensorsSpec> twice{{"a", DType::f32, {1}}, {"a", DType::f32, {1}}};
  expect_error(ErrorKind::usage, "declared twice", [&] { SafetensorsWriter(folder / "x", twice); });
  expect_error(ErrorKind::usage, "__metadata__", [&] {
    SafetensorsWriter(folder / "x", {{"__metadata__", DType::f32, {1}}});
  });
  expect_error(ErrorKind::usage, "UTF-8", [&] {
    SafetensorsWriter(folder / "x", {{"\xff", DType::f32, {1}}});
  });
  expect_error(ErrorKind::usage, "-1", [&] { SafetensorsWriter(folder / "x", {{"a", DType::f32, {-1}}}); });

  SafetensorsWriter writer(folder / "x", {{"a", DType::f32, {4}}});
  expect_error(ErrorKind::usage, "not declared", [&] { writer.write("b", 0, bytes_of("1234")); });
  expect_error(ErrorKind::usage, "outside", [&] { writer.write("a", 3, bytes_of("12345678")); });
  expect_error(ErrorKind::usage, "whole number", [&] { writer.write("a", 0, bytes_of("123")); });
  const Tensor wrong = Tensor::zeros(*device, Shape{1}, DType::bf16);
  expect_error(ErrorKind::usage, "declared as fp32", [&] { writer.write("a", 0, wrong); });
  writer.write("a", 0, bytes_of("12345678"));
  expect_error(ErrorKind::usage, "written before", [&] { writer.write("a", 1, bytes_of("12345678")); });
  expect_error(ErrorKind::usage, "element at 2 of 4", [&] { writer.finish(); });
  EXPECT_FALSE(std::filesystem::exists(folder / "x"));
}

TEST_F(Safetensors, ReaderRefusesBrokenFiles) {
  const std::string one = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  write_text(folder / "good", file_with(one + "   ", "12345678"));
  EXPECT_EQ(SafetensorsFile(folder / "good").entries().size(), 1u);

  expect_bad("", "0 bytes");
  expect_bad("1234567", "7 bytes");
  expect_bad(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}", "over the format's limit");
  expect_bad(file_with(one, "").substr(0, 30), "does not fit");
  expect_bad("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n",
             "run `git lfs pull`");
  expect_bad_header(" {}", "", "does not begin with '{'");
  expect_bad_header("{\"a\":", "", "not JSON");
  expect_bad_header(one, "1234", "truncated: 4 of 8 bytes");
  expect_bad_header(one, "123456789", "1 bytes follow");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "12345678", "need 12");
  expect_bad_header(R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", "12345678",
                    "unknown dtype 'F99'");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "12345678", "shape");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "12345678", "ascending");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2]}})", "12345678", "no data_offsets");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", "12345678",
                    "keys besides");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "",
                    "impossible");
  expect_bad_header(R"({"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}})", "1", "impossible");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "12345678", "gap of 4");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
                        "b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
                    "123456", "overlaps");
  expect_bad_header(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
                        "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                    "1", "twice");
  expect_bad_header(R"({"__metadata__":{"a":1}})", "", "not a string");
  expect_bad_header(R"({"a":[]})", "", "not an object");
}

TEST_F(Safetensors, ReaderNamesWhatIsMissing) {
  write_text(folder / "x",
             file_with(R"({"wte.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678"));
  SafetensorsFile file(folder / "x");
  Tensor out = Tensor::zeros(*device, Shape{2}, DType::f32);
  expect_error(ErrorKind::data, "nearest name there is 'wte.weight'",
               [&] { file.read("wte.weights", 0, out); });
  expect_error(ErrorKind::data, "outside", [&] { file.read("wte.weight", 1, out); });
  expect_error(ErrorKind::data, "outside", [&] { file.read("wte.weight", -1, out); });
  Tensor wrong = Tensor::zeros(*device, Shape{2}, DType::i32);
  expect_error(ErrorKind::data, "holds F32, not int32", [&] { file.read("wte.weight", 0, wrong); });
  expect_error(ErrorKind::io, "No such file", [&] { SafetensorsFile none(folder / "none"); });
}

TEST_F(Safetensors, CarriesTypesThatSherdDoesNotComputeWith) {
  write_text(folder / "x",
             file_with(R"({"mask":{"dtype":"BOOL","shape":[2,1],"data_offsets":[0,2]}})", "\1\1"));
  SafetensorsFile file(folder / "x");
  EXPECT_EQ(file.at("mask").dtype, std::nullopt);
  std::string mask(2, ' ');
  file.read_bytes(file.at("mask"), 0, std::as_writable_bytes(std::span(mask)));
  EXPECT_EQ(mask, "\1\1");
  Tensor out = Tensor::zeros(*device, Shape{2}, DType::u8);
  expect_error(ErrorKind::data, "holds BOOL", [&] { file.read("mask", 0, out); });
}

/// Which it could not be for a mapping: the kernel kills who reads a page behind the end of its file.
TEST_F(Safetensors, AFileThatIsCutOrReplacedWhileOpenIsAnError) {
  const std::string content =
      file_with(R"({"a":{"dtype":"F32","shape":[2048],"data_offsets":[0,8192]}})", std::string(8192, '1'));
  Tensor out = Tensor::zeros(*device, Shape{4}, DType::f32);
  const auto read_after = [&](const std::function<void()>& change) {
    write_text(folder / "x", content);
    SafetensorsFile file(folder / "x");
    file.read("a", 2040, out);
    change();
    file.read("a", 2040, out);
  };
  expect_error(ErrorKind::data, (folder / "x").string() + "' was cut or replaced while it was read",
               [&] { read_after([&] { std::filesystem::resize_file(folder / "x", 100); }); });
  expect_error(ErrorKind::data, "was cut or replaced", [&] {
    read_after([&] {
      write_text(folder / "y", content);
      std::filesystem::rename(folder / "y", folder / "x");
    });
  });
  expect_error(ErrorKind::io, "No such file",
               [&] { read_after([&] { std::filesystem::remove(folder / "x"); }); });
}

TEST_F(Safetensors, TimeGrowsWithTheNumberOfTensors) {
  const auto processor_time_of = [&](int count) {
    std::vector<SafetensorsSpec> specs;
    for (int i = 0; i < count; ++i) specs.push_back({cat("blocks.", i, ".weight"), DType::u8, {0}});
    const std::clock_t start = std::clock();
    SafetensorsWriter(folder / "x", specs).finish();
    EXPECT_EQ(SafetensorsFile(folder / "x").entries().size(), specs.size());
    return static_cast<double>(std::clock() - start);
  };
  const double few = processor_time_of(10'000);
  EXPECT_LT(processor_time_of(100'000), 40 * few) << "with their square it would be a hundred times as much";
}

TEST_F(Safetensors, DeepAndLongHeadersAreErrors) {
  expect_bad_header("{\"a\":" + std::string(300'000, '['), "", "nested deeper than 16");
  expect_bad_header("{\"a\":" + std::string(300'000, '[') + std::string(300'000, ']') + "}", "",
                    "nested deeper");
  std::string list = R"({"a":{"dtype":"U8","shape":[1)";
  for (int i = 0; i < 300'000; ++i) list += ",1";
  expect_bad_header(list + R"(],"data_offsets":[0,1]}})", "1", "more than 4096 items");
  expect_bad_header(R"({"a\nb":[]})", "", "'a\\nb' is not an object");
}

}  // namespace
}  // namespace sherd::tensor

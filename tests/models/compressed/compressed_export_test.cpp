// Folders in compressed-tensors' forms: what their config.json says is what its classes write, and what is
// read again is what the written error tells.
#include "models/hub/compressed_export.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>

#include "models/compressed/reference_numbers.h"
#include "models/hub/low_bit_files.h"
#include "support/expect_error.h"

namespace sherd::models {
namespace {

using sherd::testing::TempFolder;
using tensor::SafetensorsFolder;
using test::PublishedModel;

struct Written {
  double error = 0;
  std::vector<CompressedLayer> layers;
};

Written write(PublishedModel& of, const std::filesystem::path& to, const CompressedScheme& scheme,
              Calibration* calibration = nullptr) {
  Written out;
  CompressedExport form(scheme, of.options, of.linear, calibration,
                        [&](const CompressedLayer& layer) { out.layers.push_back(layer); });
  export_to_hugging_face(to, of.layout, of.model.parameters(), of.weights, *of.cpu.device,
                         {.dtype = scheme.scale_dtype, .low_bits = &form});
  out.error = form.error();
  return out;
}

std::map<std::string, std::vector<double>> values(PublishedModel& of, const std::filesystem::path& folder) {
  HuggingFaceWeights files(folder, of.layout);
  files.check(of.model.parameters());
  std::map<std::string, std::vector<double>> out;
  for (const auto& p : of.model.parameters()) {
    const tensor::Tensor to = tensor::Tensor::empty(*of.cpu.device, p->shape, DType::f32);
    files.read(p->name, p->logical_slice(), 0, to);
    out[p->name] = of.cpu.values(to);
  }
  return out;
}

TEST(CompressedExport, IsReadAsWhatItTells) {
  for (const auto& [family, scheme, most] :
       {std::tuple{"llama", CompressedScheme{.kind = CompressedKind::int8}, 0.01},
        {"qwen2", CompressedScheme{.kind = CompressedKind::fp8}, 0.04},
        {"phi3", CompressedScheme{.kind = CompressedKind::int4, .group = 4}, 0.12},
        {"mixtral", CompressedScheme{.kind = CompressedKind::int4, .group = 2}, 0.12},
        {"deepseek_v3", CompressedScheme{.kind = CompressedKind::int8}, 0.01},
        {"qwen3_next", CompressedScheme{.kind = CompressedKind::int4, .group = 2}, 0.12},
        {"qwen3_moe", CompressedScheme{.kind = CompressedKind::fp8}, 0.04}}) {
    SCOPED_TRACE(cat(family, " ", name_of(scheme.kind)));
    PublishedModel published(family);
    const TempFolder out;
    const Written written = write(published, out.path(), scheme);
    const auto before = values(published, published.folder), after = values(published, out.path());
    double away = 0, squares = 0;
    for (const auto& [name, a] : before) {
      const auto& b = after.at(name);
      EXPECT_EQ(a != b, published.linear.contains(name)) << name;
      for (std::size_t i = 0; published.linear.contains(name) && i < a.size(); ++i)
        away += (a[i] - b[i]) * (a[i] - b[i]), squares += a[i] * a[i];
    }
    EXPECT_NEAR(std::sqrt(away / squares), written.error, 1e-6);
    EXPECT_GT(written.error, 1e-4);
    EXPECT_LT(written.error, most);
    EXPECT_GE(written.layers.size(), published.linear.size() - 1) << "a gate's rows are among queries'";
  }
}

TEST(CompressedExport, NamesTensorsAsPublished) {
  PublishedModel published("llama");
  const TempFolder out;
  CompressedScheme scheme{.kind = CompressedKind::int4, .group = 4, .scale_dtype = DType::bf16};
  write(published, out.path(), scheme);
  const SafetensorsFolder files(out.path());
  const auto is = [&](const SafetensorsFolder& in, const std::string& name, const char* type,
                      const std::vector<std::int64_t>& shape) {
    ASSERT_TRUE(in.find(name)) << name;
    EXPECT_EQ(in.find(name)->dtype_name, type) << name;
    EXPECT_EQ(in.find(name)->shape, shape) << name;
  };
  const std::string down = "model.layers.1.mlp.down_proj.";
  is(files, down + "weight_packed", "I32", {16, 3});
  is(files, down + "weight_scale", "BF16", {16, 5});
  is(files, down + "weight_shape", "I64", {2});
  is(files, "lm_head.weight", "BF16", {37, 16});
  EXPECT_FALSE(files.find(down + "weight"));
  std::vector<std::int64_t> shape(2);
  files.read_bytes(down + "weight_shape", 0, std::as_writable_bytes(std::span(shape)));
  EXPECT_EQ(shape, (std::vector<std::int64_t>{16, 20}));
  const TempFolder fixed;
  scheme = {.kind = CompressedKind::fp8, .static_inputs = true, .scale_dtype = DType::bf16};
  Calibration calibration(published.options, published.layout, published.weights, *published.cpu.device,
                          scheme, {{1, 2, 3, 4, 5, 6}, 2, 3});
  const Written written = write(published, fixed.path(), scheme, &calibration);
  const SafetensorsFolder in_fp8(fixed.path());
  is(in_fp8, down + "weight", "F8_E4M3", {16, 20});
  is(in_fp8, down + "weight_scale", "BF16", {16, 1});
  is(in_fp8, down + "input_scale", "BF16", {1});
  values(published, fixed.path());  // scales of inputs are passed over
  EXPECT_EQ(written.layers.size(), 14U);
  for (const CompressedLayer& layer : written.layers) EXPECT_GT(layer.output_error, 0) << layer.weight;
}

TEST(CompressedExport, WritesWhatCalibrationMade) {
  PublishedModel published("llama");
  const CompressedScheme scheme{.kind = CompressedKind::int4, .group = 4};
  const CalibrationTexts texts{{1, 2, 3, 4, 5, 6, 7, 8}, 2, 4};
  const auto make = [&] {
    return std::make_unique<Calibration>(published.options, published.layout, published.weights,
                                         *published.cpu.device, scheme, texts);
  };
  const TempFolder out;
  const auto calibration = make(), again = make();
  const Written written = write(published, out.path(), scheme, calibration.get());
  const SafetensorsFolder files(out.path());
  for (const CompressedLayer& layer : written.layers) {
    const Calibration::Matrix made = again->take(layer.weight);
    std::vector<std::byte> packed(files.find(layer.weight + "_packed")->bytes);
    files.read_bytes(layer.weight + "_packed", 0, packed);
    EXPECT_EQ(packed, pack_int4(made.compressed)) << layer.weight;
    EXPECT_EQ(layer.output_error, made.output_error);
  }
  EXPECT_EQ(written.layers.size(), 14U);
}

/// Without spaces, and without the key of another feature that is null.
std::string squeezed(std::string text) {
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n'; });
  const std::string other = ",\"moe_sparsity_config\":null";
  for (std::size_t at; (at = text.find(other)) != std::string::npos;) text.erase(at, other.size());
  return text;
}

TEST(CompressedExport, DescribesItselfAsCompressedTensorsDoes) {
  PublishedModel published("llama");
  Calibration calibration(published.options, published.layout, published.weights, *published.cpu.device,
                          {.kind = CompressedKind::int8}, {{1, 2}, 1, 2});
  const std::string theirs = squeezed(testing::read_text(std::filesystem::path(SHERD_SOURCE_DIR) /
                                                         "tests/models/compressed/reference/configs.json"));
  struct Case {
    const char* name;
    CompressedScheme scheme;
  };
  for (const auto& [name, scheme] :
       {Case{"int8", {.kind = CompressedKind::int8}},
        Case{"int8_static", {.kind = CompressedKind::int8, .static_inputs = true}},
        Case{"fp8", {.kind = CompressedKind::fp8}},
        Case{"fp8_static", {.kind = CompressedKind::fp8, .static_inputs = true}},
        Case{"int4", {.kind = CompressedKind::int4}},
        Case{"int4_ordered", {.kind = CompressedKind::int4, .group = 64, .activation_order = true}}}) {
    const CompressedExport form(scheme, published.options, published.linear, &calibration);
    const std::string text = form.described(published.config, {"lm_head.weight"}, "float32");
    const std::string section = squeezed(text.substr(text.find("\"quantization_config\": ")));
    const std::string own = section.substr(section.find('{'), section.size() - section.find('{') - 1);
    EXPECT_NE(theirs.find(cat("\"", name, "\":", own)), std::string::npos) << name << ": " << own;
    EXPECT_NO_THROW(from_hugging_face(text, "config.json"));
  }
}

TEST(CompressedFiles, OtherFormsAreRefusedByTheirConfig) {
  PublishedModel published("llama");
  const CompressedExport form({.kind = CompressedKind::int4}, published.options, published.linear, nullptr);
  std::string text = form.described(published.config, {}, "float32");
  for (std::size_t at = 0; (at = text.find("pack-quantized", at)) != std::string::npos; at += 20)
    text.insert(at, "nvfp4-");
  testing::expect_error(ErrorKind::config, "take the files of the model before it was quantised",
                        [&] { from_hugging_face(text, "config.json"); });
}

TEST(CompressedExport, RefusesFamiliesWithoutAForm) {
  for (const auto& [family, part] : {std::pair{"gpt2", "gpt2 stores its matrices transposed"},
                                     {"gpt_oss", "stores all experts of a layer in one tensor"},
                                     {"bert", "is the form of decoders, which bert is not"},
                                     {"t5", "is the form of decoders, which t5 is not"}})
    testing::expect_error(ErrorKind::config, part, [&, family = family] {
      CompressedExport({.kind = CompressedKind::int8}, PublishedModel(family).options, {}, nullptr);
    });
  testing::expect_error(ErrorKind::config,
                        "model.layers.0.mlp.down_proj.weight has 20 inputs, no multiple of", [&] {
                          PublishedModel published("llama");
                          const TempFolder out;
                          write(published, out.path(), {.kind = CompressedKind::int4, .group = 16});
                        });
}

// ---- files of others ----

/// A folder with one matrix, of given tensors.
class OtherFiles {
 public:
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
           std::vector<std::byte> bytes, const char* type = "") {
    specs_.push_back({"a." + name, dtype, std::move(shape), type});
    bytes_.push_back(std::move(bytes));
  }
  template <class T>
  void add(const std::string& name, std::vector<std::int64_t> shape, const std::vector<T>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    add(name, dtype_of<T>(), std::move(shape), {bytes.begin(), bytes.end()});
  }
  /// The numbers of elements [first, first + count). Throws the first of the findings of check().
  std::vector<float> read(std::vector<std::int64_t> shape, std::int64_t first, std::size_t count) {
    const TempFolder folder;
    tensor::SafetensorsFolderWriter writer(folder.path(), specs_, 1 << 30, {});
    for (std::size_t i = 0; i < specs_.size(); ++i) writer.write(specs_[i].name, 0, bytes_[i]);
    writer.finish();
    const SafetensorsFolder files(folder.path());
    const auto matrix = find_low_bits(files, "a.weight");
    require(matrix != nullptr, "it is in no form");
    const PublishedTensor as{"a.weight", tensor::Shape(std::span<const std::int64_t>(shape))};
    std::set<std::string> expected{"a.weight"};
    std::vector<std::string> missing, misshapen, types;
    matrix->check(as, {expected, missing, misshapen, types});
    for (const auto* found : {&missing, &misshapen, &types})
      if (!found->empty()) fail(ErrorKind::data, found->front());
    for (const std::string& name : files.names()) require(expected.contains(name), name, " is not expected");
    std::vector<float> out(count);
    matrix->read(as, first, out);
    return out;
  }

 private:
  std::vector<tensor::SafetensorsSpec> specs_;
  std::vector<std::vector<std::byte>> bytes_;
};

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (const int value : values) out.push_back(static_cast<std::byte>(value));
  return out;
}

TEST(CompressedFiles, OneScaleOrSquaresOfThem) {
  OtherFiles one;
  one.add("weight", DType::u8, {2, 2}, bytes({0x38, 0x40, 0xb8, 0}), "F8_E4M3");
  one.add("weight_scale", {1}, std::vector<float>{3});
  EXPECT_EQ(one.read({2, 2}, 1, 3), (std::vector<float>{6, -3, 0}));
  OtherFiles squares;
  squares.add("weight", DType::u8, {129, 130}, std::vector<std::byte>(129 * 130, std::byte{0x38}), "F8_E4M3");
  squares.add("weight_scale", {2, 2}, std::vector<float>{1, 2, 3, 4});
  EXPECT_EQ(squares.read({129, 130}, 127, 2), (std::vector<float>{1, 2}));
  EXPECT_EQ(squares.read({129, 130}, 128 * 130 + 127, 2), (std::vector<float>{3, 4}));
}

TEST(CompressedFiles, ZeroPoints) {
  OtherFiles in_8_bits;
  in_8_bits.add("weight", DType::u8, {2, 2}, bytes({5, 250, 1, 2}), "I8");
  in_8_bits.add("weight_scale", {2, 1}, std::vector<float>{2, 1});
  in_8_bits.add("weight_zero_point", DType::u8, {2, 1}, bytes({1, 254}), "I8");
  EXPECT_EQ(in_8_bits.read({2, 2}, 0, 4), (std::vector<float>{8, -14, 3, 4}));
  // Nine rows of two groups of four: zero points lie eight rows to a word, in groups' columns.
  OtherFiles packed;
  std::vector<std::int32_t> codes(9), points{0x76543210, 0x01234567, 0xf, 0xe};
  for (int row = 0; row < 9; ++row) codes[static_cast<std::size_t>(row)] = 0x01234567 + row;
  packed.add("weight_packed", {9, 1}, codes);
  packed.add("weight_scale", {9, 2}, std::vector<float>(18, 0.5f));
  packed.add("weight_zero_point", {2, 2}, points);
  packed.add("weight_shape", {2}, std::vector<std::int64_t>{9, 8});
  // Codes 7, 6, 5, 4 less zero point 0, and 3, 2, 1, 0 less 7, halved.
  EXPECT_EQ(packed.read({9, 8}, 0, 8), (std::vector<float>{3.5, 3, 2.5, 2, -2, -2.5, -3, -3.5}));
  // Row 5: 12 and 6, less 5.
  EXPECT_EQ(packed.read({9, 8}, 40, 2), (std::vector<float>{3.5, 0.5}));
  // Row 8: its first code is 15, less 15; its last group's point is 14.
  EXPECT_EQ(packed.read({9, 8}, 64, 5), (std::vector<float>{0, -4.5, -5, -5.5, -5.5}));
}

TEST(CompressedFiles, EightBitsPacked) {
  OtherFiles files;
  files.add("weight_packed", DType::i32, {1, 2}, bytes({128, 129, 127, 0, 255, 0, 0, 0}));
  files.add("weight_scale", {1, 1}, std::vector<float>{2});
  files.add("weight_shape", {2}, std::vector<std::int64_t>{1, 5});
  EXPECT_EQ(files.read({1, 5}, 0, 5), (std::vector<float>{0, 2, -2, -256, 254}));
}

TEST(CompressedFiles, TellsWhatItDoesNotRead) {
  const auto packed = [](std::int64_t words) {
    OtherFiles files;
    files.add("weight_packed", {2, words}, std::vector<std::int32_t>(static_cast<std::size_t>(2 * words)));
    files.add("weight_scale", {2, 1}, std::vector<float>(2, 1.0f));
    return files;
  };
  testing::expect_error(ErrorKind::data, "a.weight_packed [2, 3] for [2, 16] of 4 or 8 bits", [&] {
    packed(3).read({2, 16}, 0, 1);
  });
  OtherFiles ordered = packed(2);
  ordered.add("weight_g_idx", {16}, std::vector<std::int32_t>(16));
  testing::expect_error(ErrorKind::data, "weight_g_idx (groups in the order of activations)", [&] {
    ordered.read({2, 16}, 0, 1);
  });
  OtherFiles bad;
  bad.add("weight", DType::u8, {2, 2}, bytes({1, 2, 3, 4}), "I8");
  bad.add("weight_scale", {3, 1}, std::vector<float>(3, 1.0f));
  testing::expect_error(ErrorKind::data, "a.weight_scale [3, 1] for [2, 2]", [&] { bad.read({2, 2}, 0, 1); });
}

}  // namespace
}  // namespace sherd::models

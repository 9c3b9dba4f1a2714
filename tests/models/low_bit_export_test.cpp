// Matrices in few bits, written as bitsandbytes and others published them: files of theirs come back byte for
// byte, and what comes back of others stands for the nearest values.
#include "models/hub/low_bit_export.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "models/gpt.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "models/hub/low_bit_files.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/places.h"
#include "support/temp_folder.h"
#include "tensor/formats/stored_format.h"

namespace sherd::models {
namespace {

using sherd::testing::TempFolder;
using tensor::SafetensorsFolder;

/// A family's tiny model in published files, and how it is written again.
struct Published {
  explicit Published(const std::string& family)
      : folder(std::filesystem::path(SHERD_SOURCE_DIR) / "tests/models/reference/hugging_face" / family),
        options(GptConfig{from_hugging_face(testing::read_text(folder / "config.json"), "config.json").model}
                    .resolved()),
        model(options),
        weights(folder, HuggingFaceLayout(options)) {
    model.assign_names();
  }

  /// Writes it in a format, and gives the share that was rounded away.
  double write(const std::filesystem::path& to, StoredFormat format) {
    std::set<std::string> linear;
    for (const auto& weight : model.linear_weights()) linear.insert(weight->name);
    LowBitExport low_bits(format, options, linear);
    export_to_hugging_face(to, HuggingFaceLayout(options), model.parameters(), weights, *cpu.device,
                           {.dtype = DType::f32, .low_bits = &low_bits});
    return low_bits.error();
  }

  test::Cpu cpu{1};
  std::filesystem::path folder;
  GptConfig options;
  Gpt model;
  HuggingFaceWeights weights;
};

std::vector<std::byte> bytes(const SafetensorsFolder& files, const std::string& name) {
  std::vector<std::byte> out(files.find(name)->bytes);
  files.read_bytes(name, 0, out);
  return out;
}

/// Values that the files stand for, by parameter.
std::map<std::string, std::vector<double>> values(Published& of, const std::filesystem::path& folder) {
  HuggingFaceWeights files(folder, HuggingFaceLayout(of.options));
  files.check(of.model.parameters());
  std::map<std::string, std::vector<double>> out;
  for (const auto& p : of.model.parameters()) {
    const tensor::Tensor to = tensor::Tensor::empty(*of.cpu.device, p->shape, DType::f32);
    files.read(p->name, p->logical_slice(), 0, to);
    out[p->name] = of.cpu.values(to);
  }
  return out;
}

/// To the same numbers; to the same bytes where these have one form alone (0 has two codes in fp4, and blocks
/// of mxfp4 without a large number several exponents).
TEST(LowBitExport, FilesThatOthersWroteComeBack) {
  for (const auto& [family, format] : {std::pair{"gpt2_fp4", StoredFormat::fp4},
                                       {"llama_int8", StoredFormat::int8},
                                       {"gpt_oss_mxfp4", StoredFormat::mxfp4}}) {
    SCOPED_TRACE(family);
    Published published(family);
    const TempFolder out;
    EXPECT_LT(published.write(out.path(), format), 1e-7);
    const SafetensorsFolder there(published.folder), back(out.path());
    ASSERT_EQ(back.names(), there.names());
    for (const std::string& name : there.names()) {
      EXPECT_EQ(back.find(name)->dtype_name, there.find(name)->dtype_name) << name;
      EXPECT_EQ(back.find(name)->shape, there.find(name)->shape) << name;
      const bool one_form = family == std::string("llama_int8") || name.ends_with(".absmax") ||
                            name.find("quant_") != std::string::npos;
      if (one_form) {
        EXPECT_TRUE(bytes(back, name) == bytes(there, name)) << name;
      }
    }
    const auto now = values(published, out.path());
    for (const auto& [name, value] : values(published, published.folder))
      for (std::size_t i = 0; i < value.size(); ++i)
        ASSERT_NEAR(now.at(name)[i], value[i], 1e-37) << name;  // where mxfp4's scales end
  }
}

/// Scales in 8 bits are rounded around another mean the second time; codes of 4 bits stay.
TEST(LowBitExport, CodesBesideScalesIn8BitsComeBack) {
  Published published("llama_nf4");
  const TempFolder out;
  EXPECT_LT(published.write(out.path(), StoredFormat::nf4_double), 5e-3);
  const SafetensorsFolder there(published.folder), back(out.path());
  ASSERT_EQ(back.names(), there.names());
  for (const std::string& name : there.names()) {
    if (name.find(".absmax") == std::string::npos && name.find("nested_absmax") == std::string::npos &&
        name.find("quant_state") == std::string::npos) {
      EXPECT_TRUE(bytes(back, name) == bytes(there, name)) << name;
    }
  }
  EXPECT_EQ(values(published, out.path()).size(), published.model.parameters().size());
}

/// The weights that are read again are off by the error that was told, and nothing else has changed.
TEST(LowBitExport, TellsWhatItRoundedAway) {
  for (const auto& [family, format, most] : {std::tuple{"llama", StoredFormat::nf4, 0.12},
                                             {"llama", StoredFormat::nf4_double, 0.12},
                                             {"llama", StoredFormat::fp4, 0.15},
                                             {"qwen2", StoredFormat::int8, 0.01},
                                             {"llama", StoredFormat::fp8, 0.04},
                                             {"gpt2", StoredFormat::int8, 0.01},
                                             {"qwen3_moe", StoredFormat::fp8, 0.04},
                                             {"qwen3_next", StoredFormat::int8, 0.01},
                                             {"mixtral", StoredFormat::nf4, 0.12}}) {
    SCOPED_TRACE(cat(family, " ", tensor::name_of(format)));
    Published published(family);
    const TempFolder out;
    const double told = published.write(out.path(), format);
    const auto before = values(published, published.folder), after = values(published, out.path());
    double away = 0, squares = 0;
    std::size_t changed = 0;
    for (const auto& weight : published.model.linear_weights()) {
      const auto &a = before.at(weight->name), &b = after.at(weight->name);
      if (a == b) continue;
      ++changed;
      for (std::size_t i = 0; i < a.size(); ++i)
        away += (a[i] - b[i]) * (a[i] - b[i]), squares += a[i] * a[i];
    }
    EXPECT_GT(changed, 0U);
    EXPECT_NEAR(std::sqrt(away / squares), told, 1e-6);
    EXPECT_LT(told, most);
    EXPECT_GT(told, 1e-4);
    std::size_t others = 0;
    for (const auto& [name, value] : before) others += value != after.at(name);
    EXPECT_EQ(others, changed) << "tables, norms, routers and heads stay";
  }
}

/// Each square of fp8's matrices has a scale of its own, also where rows and columns are no multiples of 128.
TEST(LowBitExport, SquaresOfFp8HaveScalesOfTheirOwn) {
  const PublishedTensor matrix{"a.weight", {130, 260}};
  const auto size_of_square = [](std::size_t i) {
    const double sizes[2][3] = {{1, 1e-3, 50}, {1e4, 3, 1e-6}};
    return sizes[i / 260 / 128][i % 260 / 128];
  };
  std::vector<float> values(130 * 260);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(size_of_square(i) * std::sin(static_cast<double>(i)));
  const TempFolder folder;
  LowBitExport low_bits(StoredFormat::fp8, Published("llama").options, {"a"});
  ASSERT_TRUE(low_bits.takes("a", matrix));
  tensor::SafetensorsFolderWriter files(folder.path(), low_bits.specs(matrix), 1 << 30, {});
  low_bits.write(files, matrix, values);
  files.finish();
  const SafetensorsFolder written(folder.path());
  EXPECT_EQ(written.find("a.weight_scale_inv")->shape, (std::vector<std::int64_t>{2, 3}));
  std::vector<float> got(values.size());
  find_low_bits(written, "a.weight")->read(matrix, 0, got);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_NEAR(got[i], values[i], std::abs(values[i]) / 15 + 1e-5 * size_of_square(i)) << i;
  std::vector<float> broken(values.size(), std::numeric_limits<float>::infinity());
  testing::expect_error(ErrorKind::data, "a value of a.weight is infinite or no number",
                        [&] { low_bits.write(files, matrix, broken); });
  LowBitExport in_8_bits(StoredFormat::int8, Published("llama").options, {"a"});
  broken.assign(values.size(), 1e5f);  // more than fp16 holds, to which bitsandbytes rounds first
  testing::expect_error(ErrorKind::data, "a value of a.weight is infinite or no number",
                        [&] { in_8_bits.write(files, matrix, broken); });
}

TEST(LowBitExport, FormatsOfOtherFamiliesAreRefused) {
  testing::expect_error(ErrorKind::config, "mxfp4 is the form of GPT-OSS's experts",
                        [] { LowBitExport(StoredFormat::mxfp4, Published("llama").options, {}); });
  testing::expect_error(ErrorKind::config, "take nf4, fp4 or int8",
                        [] { LowBitExport(StoredFormat::fp8, Published("gpt2").options, {}); });
}

}  // namespace
}  // namespace sherd::models

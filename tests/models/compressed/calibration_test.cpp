// Calibration block by block, against the same in PyTorch and NumPy
// (scripts/references/make_compressed_reference.py).
#include "models/compressed/calibration.h"

#include <gtest/gtest.h>

#include <cmath>

#include "models/compressed/reference_numbers.h"
#include "support/expect_error.h"

namespace sherd::models {
namespace {

using test::Numbers;
using test::PublishedModel;

const std::vector<std::string> parts{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                     "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
                                     "mlp.down_proj"};

/// The first texts. All 180 pass the model in two batches.
CalibrationTexts texts(std::int64_t sequences) {
  auto tokens = Numbers("llama.safetensors").of<std::int32_t>("tokens");
  tokens.resize(static_cast<std::size_t>(sequences * 12));
  return {tokens, sequences, 12};
}

TEST(Calibration, HasThePapersCodesInEveryBlock) {
  const Numbers numbers("llama.safetensors");
  PublishedModel published("llama");
  std::vector<double> told;
  Calibration calibration(published.options, published.layout, published.weights, *published.cpu.device,
                          {.kind = CompressedKind::int4, .group = 4}, texts(180),
                          [&](double done, double total) { told.push_back(done / total); });
  std::size_t other = 0;
  for (int layer = 0; layer < 2; ++layer)
    for (const std::string& part : parts) {
      const std::string name = cat("model.layers.", layer, ".", part);
      const Calibration::Matrix made = calibration.take(name + ".weight");
      const auto codes = numbers.of<std::uint8_t>(cat("int4.", name, ".codes"));
      const auto scales = numbers.of<float>(cat("int4.", name, ".scales"));
      ASSERT_EQ(made.compressed.codes.size(), codes.size()) << name;
      for (std::size_t i = 0; i < codes.size(); ++i) other += codes[i] != made.compressed.codes[i];
      ASSERT_EQ(made.compressed.scales.size(), scales.size());
      for (std::size_t i = 0; i < scales.size(); ++i)
        EXPECT_NEAR(made.compressed.scales[i], scales[i], 1e-4 * scales[i]) << name;
      EXPECT_GT(made.output_error, 1e-3) << name;
      EXPECT_LT(made.output_error, 0.2) << name;
    }
  EXPECT_LE(other, 4U) << "of 2720 codes";
  ASSERT_FALSE(told.empty());
  EXPECT_EQ(told.back(), 1);
  EXPECT_EQ(calibration.unseen(), 0);
}

TEST(Calibration, FindsTheScalesOfInputs) {
  const Numbers numbers("llama.safetensors");
  PublishedModel published("llama");
  Calibration calibration(published.options, published.layout, published.weights, *published.cpu.device,
                          {.kind = CompressedKind::int8, .static_inputs = true}, texts(3));
  for (int layer = 0; layer < 2; ++layer)
    for (const std::string& part : parts) {
      const std::string name = cat("model.layers.", layer, ".", part);
      const Calibration::Matrix made = calibration.take(name + ".weight");
      const float scale = numbers.of<float>(cat("int8.", name, ".scale"))[0];
      EXPECT_NEAR(made.compressed.input_scale, scale, 1e-5 * scale) << name;
      const float error = numbers.of<float>(cat("int8.", name, ".error"))[0];
      EXPECT_NEAR(made.output_error, error, 0.01 * error) << name;
    }
}

/// An expert that no token reaches is rounded to nearest, and has its neighbours' inputs.
TEST(Calibration, KnowsExpertsThatNoTokenReaches) {
  PublishedModel published("mixtral");
  const CalibrationTexts one{{5}, 1, 1};  // reaches two of the experts
  Calibration calibration(published.options, published.layout, published.weights, *published.cpu.device,
                          {.kind = CompressedKind::int8, .static_inputs = true}, one);
  std::map<bool, int> seen;
  for (int expert = 0; expert < published.options.moe.experts; ++expert) {
    const Calibration::Matrix made =
        calibration.take(cat("model.layers.0.block_sparse_moe.experts.", expert, ".w1.weight"));
    ++seen[made.output_error >= 0];
    EXPECT_GT(made.compressed.input_scale, 1e-6f);
  }
  EXPECT_EQ(seen[true], 2);
  EXPECT_EQ(seen[false], published.options.moe.experts - 2);
  EXPECT_EQ(calibration.unseen(), 2 * (published.options.moe.experts - 2))
      << "in the first layer, up and down";
}

/// Layers of every kind tell what they are given, in every family whose layers have such a form.
TEST(Calibration, SeesTheLayersOfEveryFamily) {
  for (const char* family : {"deepseek_v2_lite",
                             "deepseek_v3",
                             "gemma2",
                             "gemma3_text",
                             "glm4",
                             "glm4_moe",
                             "granite",
                             "ministral3",
                             "mistral",
                             "olmo2",
                             "olmo3",
                             "phi3",
                             "qwen2",
                             "qwen2_moe",
                             "qwen3",
                             "qwen3_5",
                             "qwen3_5_moe",
                             "qwen3_moe",
                             "qwen3_next",
                             "smollm3"}) {
    SCOPED_TRACE(family);
    PublishedModel published(family);
    CalibrationTexts texts{{}, 8, 12};
    for (std::int32_t i = 0; i < 96; ++i) texts.tokens.push_back(i * i % 37);
    Calibration calibration(published.options, published.layout, published.weights, *published.cpu.device,
                            {.kind = CompressedKind::int4, .group = 1}, texts);
    std::set<std::string> seen;  // a gate's rows lie in one matrix with its queries'
    for (const auto& p : published.model.parameters())
      for (const PublishedTensor& tensor : published.layout.published(p->name).tensors)
        if (published.linear.contains(p->name) && tensor.stacked == 0 && seen.insert(tensor.name).second) {
          const double error = calibration.take(tensor.name).output_error;
          EXPECT_TRUE(is_of_expert(p->name) || error >= 0) << tensor.name;
          EXPECT_LT(error, 0.2) << tensor.name;
        }
  }
}

/// Scales of what is not finite would make every code 0.
TEST(Calibration, RefusesInputsThatAreNotFinite) {
  struct WithOneRow final : nn::ForwardedWeights {
    WithOneRow(nn::WeightSource& source, float value) : ForwardedWeights(source), value(value) {}
    void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
              const tensor::Tensor& to) override {
      source_.read(name, slice, begin, to);
      if (name == "tokens.weight") to.data<float>()[to.shape()[1]] = value;
    }
    float value;
  };
  PublishedModel published("llama");
  for (const float value : {INFINITY, NAN}) {
    WithOneRow weights(published.weights, value);
    for (const CompressedScheme& scheme :
         {CompressedScheme{.kind = CompressedKind::int4, .group = 4},
          CompressedScheme{.kind = CompressedKind::fp8, .static_inputs = true}})
      for (const std::int32_t id : {1, 2}) {
        Calibration calibration(published.options, published.layout, weights, *published.cpu.device, scheme,
                                {{id, 3}, 1, 2});
        const auto take = [&] { calibration.take("model.layers.0.self_attn.q_proj.weight"); };
        if (id == 1)
          testing::expect_error(ErrorKind::data, "in calibration is infinite or no number", take);
        else
          EXPECT_NO_THROW(take()) << "no text has the token";
      }
  }
}

TEST(Calibration, RefusesWhatItCannotRun) {
  PublishedModel published("llama"), encoder("bert");
  const CompressedScheme scheme{.kind = CompressedKind::int4, .group = 4};
  testing::expect_error(ErrorKind::data, "use token 37, and the model has ids 0 to 36", [&] {
    Calibration(published.options, published.layout, published.weights, *published.cpu.device, scheme,
                {{1, 37}, 1, 2});
  });
  testing::expect_error(ErrorKind::config, "calibration runs decoders alone", [&] {
    Calibration(encoder.options, encoder.layout, encoder.weights, *encoder.cpu.device, scheme,
                {{1, 2}, 1, 2});
  });
}

}  // namespace
}  // namespace sherd::models

#include "models/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/expect_error.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error;

TEST(SampleToken, GreedyTakesTheLikeliestAndTheLowerOfTwo) {
  const std::vector<float> logits{0.5f, 2.0f, -1.0f, 2.0f};
  EXPECT_EQ(sample_token(logits, {.temperature = 0}, 0), 1);
  for (std::uint64_t i = 0; i < 50; ++i)
    EXPECT_EQ(sample_token(logits, {.temperature = 1.0, .top_k = 1}, i), 1);
}

TEST(SampleToken, FrequenciesFollowTheSoftmax) {
  const std::vector<float> logits{1.0f, 3.0f, 2.0f, 0.0f};
  for (const int top_k : {0, 2}) {
    for (const double temperature : {1.0, 2.5}) {
      std::vector<double> weights;
      double sum = 0;
      for (std::size_t i = 0; i < 4; ++i) {
        const bool kept = top_k == 0 || i == 1 || i == 2;
        weights.push_back(kept ? std::exp(logits[i] / temperature) : 0.0);
        sum += weights.back();
      }
      std::vector<double> counts(4);
      const int draws = 20000;
      for (int i = 0; i < draws; ++i)
        counts[static_cast<std::size_t>(
            sample_token(logits, {.temperature = temperature, .top_k = top_k, .key = {1, 2}},
                         static_cast<std::uint64_t>(i)))] += 1;
      for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(counts[i] / draws, weights[i] / sum, 0.012);
    }
  }
}

TEST(SampleToken, BadArgumentsAreRefused) {
  const std::vector<float> bad{0.0f, std::numeric_limits<float>::quiet_NaN()};
  expect_error(ErrorKind::numerics, "NaN", [&] { sample_token(bad, {}, 0); });
  expect_error(ErrorKind::usage, "temperature",
               [&] { sample_token(std::vector<float>{1.0f}, {.temperature = -1}, 0); });
  expect_error(ErrorKind::usage, "no logits", [&] { sample_token(std::vector<float>{}, {}, 0); });
}

class Generate : public ::testing::Test {
 protected:
  test::Cpu cpu_;
  autograd::Tape tape_{*cpu_.kernels};
};

TEST_F(Generate, MatchesAStepByStepReadingAndSlidesPastTheWindow) {
  for (const GptOptions& o :
       {test::with_dropout(test::tiny_gpt2()), test::with_dropout(test::tiny_llama())}) {
    Gpt model(o);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
    const std::vector<std::int32_t> prompt{3, 1, 4};
    const auto got = generate(model, tape_, prompt, 12, {.temperature = 0});
    EXPECT_TRUE(tape_.training);  // as it was
    ASSERT_EQ(got.size(), 12u);
    std::vector<std::int32_t> text = prompt;
    tape_.training = false;
    for (const std::int32_t token : got) {
      const std::size_t used = std::min<std::size_t>(text.size(), static_cast<std::size_t>(o.max_seq));
      const auto window = tensor::Tensor::of<std::int32_t>(*cpu_.device, {1, static_cast<std::int64_t>(used)},
                                                           std::span(text).last(used));
      const auto scores = cpu_.values(model.logits(tape_, window).value());
      const auto last = scores.end() - model.options().padded_vocab();
      EXPECT_EQ(token, std::max_element(last, last + o.vocab_size) - last);
      text.push_back(token);
    }
    tape_.training = true;
    tape_.clear();
  }
}

TEST_F(Generate, SeedsDecideAndCallersMayStop) {
  Gpt model(test::tiny_gpt2());
  test::PlainParameters parameters(*cpu_.kernels, model, DType::bf16);
  const std::vector<std::int32_t> prompt{3};
  const auto a = generate(model, tape_, prompt, 20, {.key = {1, 1}});
  EXPECT_EQ(a, generate(model, tape_, prompt, 20, {.key = {1, 1}}));
  EXPECT_NE(a, generate(model, tape_, prompt, 20, {.key = {2, 1}}));
  for (const std::int32_t token : a) EXPECT_LT(token, 13);
  int seen = 0;
  EXPECT_EQ(generate(model, tape_, prompt, 20, {.key = {1, 1}}, [&](std::int32_t) { return ++seen < 4; }),
            std::vector(a.begin(), a.begin() + 4));
  EXPECT_EQ(tape_.size(), 0u);
  expect_error(ErrorKind::usage, "prompt", [&] { generate(model, tape_, {}, 3, {}); });
}

}  // namespace
}  // namespace sherd::models

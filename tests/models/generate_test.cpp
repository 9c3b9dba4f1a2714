#include "models/inference/generate.h"

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

/// Probabilities that transformers 5.24's RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper,
/// TopKLogitsWarper and TopPLogitsWarper leave of these logits behind the text 3 5 5 1, one after the other.
TEST(SampleToken, DrawsFromWhatTransformersLeaves) {
  const std::vector<float> logits{1.60655212f,   0.349666774f, 0.177956194f, -1.22743607f,
                                  0.0923648998f, -2.73651838f, 0.674990177f, 2.02223182f,
                                  -2.87035871f,  1.95486355f,  1.04409993f,  2.47583342f};
  const std::vector<std::int32_t> text{3, 5, 5, 1};
  struct Left {
    double penalty, temperature;
    int top_k;
    double top_p;
    std::vector<double> probabilities;
  };
  for (const Left& left : std::vector<Left>{
           {1,
            1,
            0,
            0.9,
            {0.132178, 0.0376098, 0, 0, 0, 0, 0.0520699, 0.2003026, 0, 0.187253, 0.0753163, 0.3152704}},
           {1, 0.7, 5, 0.8, {0, 0, 0, 0, 0, 0, 0, 0.2617826, 0, 0.2377629, 0, 0.5004545}},
           {1.3, 1, 0, 0.5, {0, 0, 0, 0, 0, 0, 0, 0.284996, 0, 0.2664287, 0, 0.4485753}},
           {1.5,
            2,
            6,
            0.95,
            {0.1575258, 0, 0, 0, 0, 0, 0.0988702, 0.1939168, 0, 0.1874936, 0.1189095, 0.2432841}},
           {1, 1, 3, 0.3, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}},
           {0.8,
            0.5,
            0,
            0.97,
            {0.0871655, 0, 0, 0, 0, 0, 0.013527, 0.2001701, 0, 0.1749379, 0.0283012, 0.4958983}},
           {1, 1, 4, 1, {0.1582962, 0, 0, 0, 0, 0, 0, 0.2398822, 0, 0.2242541, 0, 0.3775675}}}) {
    const Sampling sampling{.temperature = left.temperature,
                            .top_k = left.top_k,
                            .top_p = left.top_p,
                            .repetition_penalty = left.penalty,
                            .key = {1, 2}};
    std::vector<double> counts(logits.size());
    constexpr int draws = 20000;
    for (std::uint64_t i = 0; i < draws; ++i)
      counts[static_cast<std::size_t>(sample_token(logits, sampling, i, text))] += 1.0 / draws;
    for (std::size_t id = 0; id < logits.size(); ++id) {
      EXPECT_NEAR(counts[id], left.probabilities[id], 0.012) << id << " at top_p " << left.top_p;
      EXPECT_EQ(counts[id] > 0, left.probabilities[id] > 0) << id << " at top_p " << left.top_p;
    }
  }
}

TEST(SampleToken, BadArgumentsAreRefused) {
  const std::vector<float> bad{0.0f, std::numeric_limits<float>::quiet_NaN()};
  expect_error(ErrorKind::numerics, "NaN", [&] { sample_token(bad, {}, 0); });
  expect_error(ErrorKind::usage, "temperature",
               [&] { sample_token(std::vector<float>{1.0f}, {.temperature = -1}, 0); });
  expect_error(ErrorKind::usage, "top_p", [&] { sample_token(std::vector<float>{1.0f}, {.top_p = 0}, 0); });
  expect_error(ErrorKind::usage, "repetition",
               [&] { sample_token(std::vector<float>{1.0f}, {.repetition_penalty = 0}, 0); });
  expect_error(ErrorKind::usage, "no logits", [&] { sample_token(std::vector<float>{}, {}, 0); });
}

class Generate : public ::testing::Test {
 protected:
  test::Cpu cpu_;
  autograd::Tape tape_{*cpu_.kernels};
};

/// Greedy tokens by reading a text's window afresh for each: from `begin` on, which moves to the last
/// max_seq/2 tokens whenever max_seq are full. Virtual tokens stay in front, and leave room for fewer.
std::vector<std::int32_t> read_afresh(test::Cpu& cpu, Gpt& model, autograd::Tape& tape,
                                      std::vector<std::int32_t> text, int tokens) {
  const auto max_seq = static_cast<std::size_t>(model.config().max_text());
  const std::vector<std::int32_t> prompt = model.config().prompt();
  std::size_t begin = text.size() > max_seq ? text.size() - max_seq : 0;
  std::vector<std::int32_t> out;
  for (int i = 0; i < tokens; ++i) {
    if (text.size() - begin > max_seq) begin = text.size() - max_seq / 2;
    std::vector<std::int32_t> window = prompt;
    window.insert(window.end(), text.begin() + static_cast<std::ptrdiff_t>(begin), text.end());
    const auto scores = cpu.values(
        model.logits(tape, tensor::Tensor::of<std::int32_t>(*cpu.device, {1, std::ssize(window)}, window))
            .value());
    const auto last = scores.end() - model.config().padded_vocab();
    out.push_back(static_cast<std::int32_t>(std::max_element(last, last + model.config().vocab_size) - last));
    text.push_back(out.back());
    tape.clear();
  }
  return out;
}

TEST_F(Generate, MatchesAStepByStepReadingAndReadsAgainWhatFillsTheWindow) {
  for (const GptConfig& o : {test::with_dropout(test::tiny_gpt2()), test::with_dropout(test::tiny_llama()),
                             test::with_prompt(test::tiny_gpt2()), test::with_prompt(test::tiny_llama())}) {
    Gpt model(o);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
    for (const std::vector<std::int32_t>& prompt :
         {std::vector<std::int32_t>{3, 1, 4}, {3}, {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5}}) {
      const auto got = generate(model, tape_, prompt, 20, {.temperature = 0});
      EXPECT_TRUE(tape_.training);  // as it was
      EXPECT_EQ(tape_.key_cache, nullptr);
      tape_.training = false;
      EXPECT_EQ(got, read_afresh(cpu_, model, tape_, prompt, 20));
      tape_.training = true;
    }
  }
}

/// Texts of other lengths beside it, that begin and end at other times, are nothing to a text.
TEST_F(Generate, ATextDoesNotDependOnItsBatch) {
  for (const GptConfig& o :
       {test::tiny_gpt2(), test::with_experts(test::tiny_llama()), test::with_prompt(test::tiny_gpt2())}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Gpt model(o);
      test::PlainParameters parameters(*cpu_.kernels, model, dtype);
      std::vector<TextRequest> requests;
      for (std::int64_t i = 0; i < 9; ++i) {
        TextRequest request;
        for (std::int64_t j = 0; j < 1 + i * 5 % 7; ++j)
          request.prompt.push_back(static_cast<std::int32_t>((3 * i + j * j) % o.vocab_size));
        request.max_tokens = i == 4 ? 0 : 1 + i * 3 % 11;
        request.key = RandomKey{5, 6}.at(static_cast<std::uint64_t>(i));
        requests.push_back(request);
      }
      const RunPass run = [&](const std::function<void(Tape&)>& body) {
        tape_.training = false;
        body(tape_);
      };
      for (const std::int64_t batch : {1, 2, 4, 20}) {
        std::vector<std::vector<std::int32_t>> got(requests.size());
        const GenerationStats stats =
            generate_texts(model, run, requests, batch, {.temperature = 1.5, .top_p = 0.9},
                           [&](std::size_t text, std::int32_t token) {
                             got[text].push_back(token);
                             return text != 7 || got[text].size() < 2;
                           });
        std::int64_t made = 0;
        for (std::size_t i = 0; i < requests.size(); ++i) {
          Sampling alone{.temperature = 1.5, .top_p = 0.9, .key = requests[i].key};
          auto want = generate(model, tape_, requests[i].prompt, requests[i].max_tokens, alone);
          if (i == 7 && want.size() > 2) want.resize(2);
          EXPECT_EQ(got[i], want) << i << " in batches of " << batch;
          made += std::ssize(got[i]);
        }
        EXPECT_EQ(stats.tokens, made);
        EXPECT_GT(stats.cache_bytes, 0u);
        if (batch == 20) {
          // A prompt leaves less of the window, which is read again once more.
          EXPECT_LE(stats.prefill_passes + stats.decode_passes, o.adapter.virtual_tokens() > 0 ? 15 : 14);
        }
      }
    }
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

#include "models/inference/score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/expect_error.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error;
using Ids = std::vector<std::int32_t>;

Ids counting_ids(std::int32_t n) {
  Ids out(static_cast<std::size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

/// Windows that lm_eval's get_rolling_token_windows() and make_disjoint_window() make of tokens 1 … 11 behind
/// the prefix token 0, for 4 positions: (context, scored).
TEST(ScoreWindows, RollAsTheCommonHarnessDoes) {
  const auto windows = score_windows(counting_ids(12), 1, 4);
  ASSERT_EQ(windows.size(), 3u);
  EXPECT_EQ(windows[0].tokens, (Ids{0, 1, 2, 3, 4}));
  EXPECT_EQ(windows[0].first, 1);
  EXPECT_EQ(windows[1].tokens, (Ids{4, 5, 6, 7, 8}));
  EXPECT_EQ(windows[1].first, 1);
  EXPECT_EQ(windows[2].tokens, (Ids{7, 8, 9, 10, 11}));
  EXPECT_EQ(windows[2].first, 2);
}

TEST(ScoreWindows, CutAContextFromItsBeginning) {
  const auto short_one = score_windows(counting_ids(5), 3, 7);
  ASSERT_EQ(short_one.size(), 1u);
  EXPECT_EQ(short_one[0].tokens, counting_ids(5));
  EXPECT_EQ(short_one[0].first, 3);
  const auto long_context = score_windows(counting_ids(20), 17, 7);
  ASSERT_EQ(long_context.size(), 1u);
  EXPECT_EQ(long_context[0].tokens, (Ids{12, 13, 14, 15, 16, 17, 18, 19}));
  EXPECT_EQ(long_context[0].first, 5);
}

TEST(ScoreWindows, ScoreEachTokenOnceWithItsMark) {
  for (std::int32_t n = 2; n < 40; ++n)
    for (std::int32_t first = 1; first < n; ++first)
      for (const std::int64_t max_seq : {1, 2, 7, 64}) {
        std::vector<bool> counted;
        for (std::int32_t i = first; i < n; ++i) counted.push_back(i % 3 == 0);
        Ids scored;
        for (const ScoreRequest& window : score_windows(counting_ids(n), first, max_seq, counted)) {
          ASSERT_LE(std::ssize(window.tokens), max_seq + 1);
          ASSERT_GE(window.first, 1);
          for (std::size_t i = static_cast<std::size_t>(window.first); i < window.tokens.size(); ++i) {
            scored.push_back(window.tokens[i]);
            ASSERT_EQ(window.counted[i - static_cast<std::size_t>(window.first)], window.tokens[i] % 3 == 0);
            ASSERT_EQ(window.tokens[i], window.tokens[i - 1] + 1);
          }
        }
        const Ids all = counting_ids(n);
        ASSERT_EQ(scored, Ids(all.begin() + first, all.end()));
      }
}

class ScoreTexts : public ::testing::Test {
 protected:
  RunPass run() {
    return [this](const std::function<void(Tape&)>& body) {
      ++passes_;
      tape_.training = false;
      body(tape_);
    };
  }
  static std::vector<ScoreRequest> requests(const GptConfig& o) {
    std::vector<ScoreRequest> out;
    for (std::int64_t i = 0; i < 11; ++i) {
      ScoreRequest text;
      const std::int64_t tokens = 2 + i * 5 % o.max_text();
      for (std::int64_t j = 0; j < tokens; ++j)
        text.tokens.push_back(static_cast<std::int32_t>((3 * i + j * j) % o.vocab_size));
      text.first = 1 + i % (tokens - 1);
      if (i % 3 == 1)
        for (std::int64_t j = text.first; j < tokens; ++j) text.counted.push_back(j % 2 == 1);
      out.push_back(text);
    }
    return out;
  }

  test::Cpu cpu_;
  autograd::Tape tape_{*cpu_.kernels};
  int passes_ = 0;
};

/// Against a softmax in double of the logits that the model gives each text alone.
TEST_F(ScoreTexts, AreTheLogSoftmaxOfTheLogits) {
  bool seen[2] = {};
  for (const GptConfig& o :
       {test::with_dropout(test::tiny_gpt2()), test::tiny_llama(), test::with_prompt(test::tiny_gpt2())}) {
    Gpt model(o);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
    const std::vector<ScoreRequest> texts = requests(o);
    const std::vector<Score> got = score_texts(model, run(), texts, 16);
    for (std::size_t t = 0; t < texts.size(); ++t) {
      Ids read = o.prompt();
      const auto before = std::ssize(read);
      read.insert(read.end(), texts[t].tokens.begin(), texts[t].tokens.end() - 1);
      const std::vector<double> logits = cpu_.values(
          model.logits(tape_, tensor::Tensor::of<std::int32_t>(*cpu_.device, {1, std::ssize(read)}, read))
              .value());
      tape_.clear();
      Score want;
      for (std::int64_t i = texts[t].first; i < std::ssize(texts[t].tokens); ++i) {
        if (!texts[t].counted.empty() && !texts[t].counted[static_cast<std::size_t>(i - texts[t].first)])
          continue;
        const double* row = logits.data() + (before + i - 1) * o.padded_vocab();
        double sum = 0;
        for (std::int64_t id = 0; id < o.vocab_size; ++id) sum += std::exp(row[id]);
        const std::int32_t id = texts[t].tokens[static_cast<std::size_t>(i)];
        want.log_likelihood += row[id] - std::log(sum);
        want.greedy = want.greedy && std::max_element(row, row + o.vocab_size) == row + id;
        ++want.tokens;
      }
      EXPECT_NEAR(got[t].log_likelihood, want.log_likelihood, 1e-12 * std::max(1.0, -want.log_likelihood));
      EXPECT_EQ(got[t].tokens, want.tokens);
      EXPECT_EQ(got[t].greedy, want.greedy);
      if (want.tokens > 0) seen[want.greedy] = true;
    }
  }
  EXPECT_TRUE(seen[0] && seen[1]);
}

TEST_F(ScoreTexts, DoNotDependOnTheirBatchNorOnWhoScoresThem) {
  GptConfig experts = test::with_experts(test::tiny_llama());
  experts.moe.capacity_factor = 1;  // drops tokens in training
  for (const GptConfig& o : {test::tiny_gpt2(), experts, test::with_prompt(test::tiny_gpt2())})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Gpt model(o);
      test::PlainParameters parameters(*cpu_.kernels, model, dtype);
      const std::vector<ScoreRequest> texts = requests(o);
      const std::vector<Score> alone = score_texts(model, run(), texts, 1);
      for (const std::int64_t most_rows : {14, 30, 1000})
        for (const int ranks : {1, 2, 3, 20}) {
          std::vector<Score> got(texts.size());
          int passes = -1;
          for (int rank = 0; rank < ranks; ++rank) {
            passes_ = 0;
            const std::vector<Score> part = score_texts(model, run(), texts, most_rows, {rank, ranks});
            EXPECT_TRUE(passes < 0 || passes == passes_) << "ranks must come to the same collectives";
            passes = passes_;
            for (std::size_t t = 0; t < texts.size(); ++t) {
              if (part[t].tokens == 0) continue;
              EXPECT_EQ(got[t].tokens, 0) << "scored twice";
              got[t] = part[t];
            }
          }
          for (std::size_t t = 0; t < texts.size(); ++t) {
            // Some instruction sets' products round otherwise for another number of rows.
            EXPECT_NEAR(got[t].log_likelihood, alone[t].log_likelihood,
                        (dtype == DType::f32 ? 2e-5 : 2e-2) * -alone[t].log_likelihood)
                << t;
            EXPECT_EQ(got[t].tokens, alone[t].tokens) << t;
            EXPECT_EQ(got[t].greedy, alone[t].greedy) << t;
          }
        }
    }
}

/// Questions of two contexts, with choices of several lengths, of one token and again of one token alone,
/// beside texts that share nothing, one of which ends where the model's positions do.
std::vector<ScoreRequest> questions(const GptConfig& o) {
  std::vector<ScoreRequest> out;
  const auto add = [&](std::int64_t seed, std::int64_t context, std::int64_t answer) {
    ScoreRequest text;
    for (std::int64_t j = 0; j < context; ++j)
      text.tokens.push_back(static_cast<std::int32_t>((3 * seed + j * j) % o.vocab_size));
    for (std::int64_t j = 0; j < answer; ++j)
      text.tokens.push_back(static_cast<std::int32_t>((std::ssize(out) + 5 * j) % o.vocab_size));
    text.first = context;
    out.push_back(text);
  };
  for (const std::int64_t answer : {4, 1, 7}) add(1, 40, answer), add(2, 33, answer);
  for (int i = 0; i < 3; ++i) add(3, 36, 1);
  add(4, 35, 3), add(1, 20, 2), add(1, 20, 3), add(5, 33, 4), add(5, 33, o.max_text() + 1 - 33);
  out[4].counted = {false, true, true, false, true, true, true};
  return out;
}

/// In double, where the two differ by the order of sums alone: the tokens that texts have alike are read
/// once, whatever a kind of layer keeps of them.
TEST_F(ScoreTexts, ReadSharedContextsOnce) {
  for (GptConfig o : {test::with_prompt(test::tiny_gpt2()), test::tiny_llama(), test::tiny_gemma(),
                      test::with_experts(test::tiny_gpt_oss()), test::tiny_latents(), test::tiny_hybrid()}) {
    o.seq_length = 64;
    Gpt model(o);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
    const std::vector<ScoreRequest> texts = questions(o);
    const std::vector<Score> want = score_texts(model, run(), texts, 1000);
    for (const std::int64_t most_rows : {1, 200, 100000})
      for (const int ranks : {1, 3}) {
        std::vector<Score> got(texts.size());
        int passes = -1;
        for (int rank = 0; rank < ranks; ++rank) {
          passes_ = 0;
          const std::vector<Score> part =
              score_texts(model, run(), texts, most_rows, {rank, ranks}, {}, SharedContexts::read_once);
          EXPECT_TRUE(passes < 0 || passes == passes_) << "ranks must come to the same collectives";
          passes = passes_;
          for (std::size_t t = 0; t < texts.size(); ++t)
            if (part[t].tokens > 0) {
              EXPECT_EQ(got[t].tokens, 0) << "scored twice";
              got[t] = part[t];
            }
        }
        // Three contexts have choices with more than a token, and one of them leaves no room beside the
        // longest.
        const int alone = 4 + 2 * 3, together = 1 + 2 * 2;
        if (ranks == 1 && most_rows != 200) {
          EXPECT_EQ(passes, most_rows == 1 ? alone : together);
        }
        for (std::size_t t = 0; t < texts.size(); ++t) {
          EXPECT_NEAR(got[t].log_likelihood, want[t].log_likelihood, 1e-9 * -want[t].log_likelihood) << t;
          EXPECT_EQ(got[t].tokens, want[t].tokens) << t;
          EXPECT_EQ(got[t].greedy, want[t].greedy) << t;
        }
      }
  }
}

/// A context with many texts is read again rather than that they all lie in the key cache at once: four do.
TEST_F(ScoreTexts, ReadAContextAgainWhereItsTextsAreTooMany) {
  GptConfig o = test::tiny_llama();
  o.seq_length = 64;
  Gpt model(o);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
  std::vector<ScoreRequest> texts;
  for (std::int32_t i = 0; i < 10; ++i) {
    ScoreRequest text{Ids(40, 3), 40, {}};
    for (std::int32_t j = 0; j < 2 + i % 3; ++j) text.tokens.push_back((i + 7 * j) % 11);
    texts.push_back(text);
  }
  const std::vector<Score> want = score_texts(model, run(), texts, 1000);
  for (const auto& [most_rows, groups] : {std::pair<std::int64_t, int>{1, 3}, {6 * 43, 2}, {100000, 1}}) {
    passes_ = 0;
    const std::vector<Score> got =
        score_texts(model, run(), texts, most_rows, {}, {}, SharedContexts::read_once);
    EXPECT_EQ(passes_, 2 * groups) << most_rows;
    for (std::size_t t = 0; t < texts.size(); ++t) {
      EXPECT_NEAR(got[t].log_likelihood, want[t].log_likelihood, 1e-9 * -want[t].log_likelihood) << t;
      EXPECT_EQ(got[t].tokens, want[t].tokens) << t;
    }
  }
}

/// Equal choices tie, whatever else is scored; as the likeliest, the first of them is taken.
TEST_F(ScoreTexts, AreEqualToTheBitWhereTheTextsAre) {
  const GptConfig o = test::tiny_gpt2();
  Gpt model(o);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  std::vector<ScoreRequest> texts = requests(o);
  const std::size_t n = texts.size();
  const std::vector<ScoreRequest> again = texts;
  texts.insert(texts.end(), again.begin(), again.end());
  texts.push_back(texts[0]), texts.back().first = std::ssize(texts.back().tokens) - 1;
  const std::vector<Score> got = score_texts(model, run(), texts, 14);
  const int once = std::exchange(passes_, 0);
  for (std::size_t t = 0; t < n; ++t) {
    EXPECT_EQ(got[t].log_likelihood, got[n + t].log_likelihood) << t;
    EXPECT_EQ(got[t].tokens, got[n + t].tokens);
  }
  score_texts(model, run(), std::span(texts).subspan(n), 14);
  EXPECT_EQ(once, passes_) << "each is computed once";
}

/// As an engine's, whose tape makes inputs what the model computes in.
TEST_F(ScoreTexts, KeepTheirDigitsOnATapeOfAnEngine) {
  const GptConfig o = test::tiny_gpt2();
  Gpt model(o);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::bf16);
  const std::vector<ScoreRequest> texts = requests(o);
  const std::vector<Score> want = score_texts(model, run(), texts, 16);
  tape_.input_dtype = DType::bf16;
  const std::vector<Score> got = score_texts(model, run(), texts, 16);
  EXPECT_EQ(tape_.input_dtype, DType::bf16);
  for (std::size_t t = 0; t < texts.size(); ++t)
    EXPECT_EQ(got[t].log_likelihood, want[t].log_likelihood) << t;
}

TEST_F(ScoreTexts, OfAModelThatIsNotFiniteAreRefused) {
  Gpt model(test::tiny_gpt2());
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  cpu_.kernels->fill(model.parameters()[0]->value, std::numeric_limits<double>::quiet_NaN());
  const std::vector<ScoreRequest> texts{{{1, 2}, 1, {}}};
  expect_error(ErrorKind::numerics, "no finite score", [&] { score_texts(model, run(), texts, 8); });
}

TEST_F(ScoreTexts, RefuseWhatIsNoText) {
  Gpt model(test::tiny_gpt2());
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  const auto score = [&](ScoreRequest text) {
    score_texts(model, run(), std::vector<ScoreRequest>{std::move(text)}, 8);
  };
  expect_error(ErrorKind::usage, "2 to 8 tokens, not 1", [&] { score({{1}, 1, {}}); });
  expect_error(ErrorKind::usage, "2 to 8 tokens, not 9", [&] { score({counting_ids(9), 1, {}}); });
  expect_error(ErrorKind::usage, "can be scored, not from 0", [&] { score({{1, 2}, 0, {}}); });
  expect_error(ErrorKind::usage, "can be scored, not from 2", [&] { score({{1, 2}, 2, {}}); });
  expect_error(ErrorKind::usage, "whether they count", [&] { score({{1, 2, 3}, 1, {true}}); });
  expect_error(ErrorKind::data, "outside the vocabulary", [&] { score({{1, 13}, 1, {}}); });
  EXPECT_TRUE(score_texts(model, run(), {}, 8).empty());
}

}  // namespace
}  // namespace sherd::models

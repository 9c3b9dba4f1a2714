// Texts for an encoder and a decoder: spans against T5's recipe (Raffel et al. 2020, 3.1.4, and the lengths
// that its library finds), prompts and their answers.
#include "data/packing/span_samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "data/blend.h"
#include "data/dataset_builder.h"
#include "data/dataset_info.h"
#include "data/loader.h"
#include "data/packing/answer_samples.h"
#include "data/tokenizer.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::data {
namespace {

/// Lengths of compute_input_and_target_lengths() of the T5 library.
TEST(SpanSamples, LengthsAreThoseOfTheRecipe) {
  struct Case {
    std::int64_t source;
    double density, mean_length;
    std::int64_t tokens, target;
  };
  for (const Case& c : {Case{512, 0.15, 3, 568, 114},
                        {1024, 0.15, 3, 1137, 229},
                        {128, 0.15, 3, 141, 29},

                        {256, 0.3, 10, 350, 116}}) {
    const SpanLengths found = span_lengths(c.source, c.density, c.mean_length);
    EXPECT_EQ(found.tokens, c.tokens) << c.source << ' ' << c.density;
    EXPECT_EQ(found.source(), c.source);
    EXPECT_EQ(found.target(), c.target) << c.source << ' ' << c.density;
  }
  for (std::int64_t source = 3; source < 700; ++source)
    EXPECT_EQ(span_lengths(source, 0.15, 3).source(), source) << "all places are taken";
  expect_error(ErrorKind::config, "has no room", [] { span_lengths(2, 0.15, 3); });
  expect_error(ErrorKind::config, "set model.encoder.seq_length to 255", [] { span_lengths(256, 0.5, 1); });
}

/// Ids that count up from the position.
class CountingText final : public Samples {
 public:
  explicit CountingText(std::int64_t length) : length_(length) {}
  std::int64_t seq_length() const override { return length_; }
  std::int64_t tokens() const override { return 10 * length_; }
  std::int64_t tokens_before(std::int64_t position) const override { return position * length_; }
  std::int64_t samples_per_round() const override { return 10; }
  void load(std::int64_t position, SampleRow& row) const override {
    row.tokens.clear(), row.labels.assign(static_cast<std::size_t>(length_), 3);
    for (std::int64_t i = 0; i < length_; ++i)
      row.tokens.push_back(static_cast<std::int32_t>(1000 + position * 37 + i));
  }
  void will_need(std::int64_t) const override {}

 private:
  std::int64_t length_;
};

SpanOptions options_of(std::int64_t source, std::int64_t places) {
  SpanOptions out;
  out.source = source, out.places = places, out.start = 0, out.end = 1;
  for (std::int32_t id = 999; id > 899; --id) out.sentinels.push_back(id);
  return out;
}

TEST(SpanSamples, WhatIsLeftAndWhatIsCutAreTheText) {
  const auto text = std::make_shared<CountingText>(141);
  const SpanSamples samples(text, options_of(128, 160));
  EXPECT_EQ(samples.seq_length(), 160);
  EXPECT_EQ(samples.tokens_before(3), 3 * 157);
  for (std::int64_t position = 0; position < 200; ++position) {
    SampleRow row, again;
    samples.load(position, row), samples.load(position, again);
    ASSERT_EQ(row.tokens, again.tokens);
    ASSERT_EQ(row.tokens.size(), 160u);
    ASSERT_EQ(row.labels.size(), 160u);
    EXPECT_EQ(row.filling, 3);
    EXPECT_EQ(row.tokens[127], 1);
    EXPECT_EQ(row.tokens[128], 0) << "the decoder's start";
    EXPECT_EQ(std::count(row.labels.begin(), row.labels.end(), no_label), 131);
    for (std::size_t i = 128; i + 1 < 157; ++i) ASSERT_EQ(row.labels[i], row.tokens[i + 1]);
    EXPECT_EQ(row.labels[156], 1);
    // Spans in the places of their sentinels give the text.
    std::map<std::int32_t, std::vector<std::int32_t>> spans;
    std::int32_t sentinel = 0;
    for (std::size_t i = 128; i < 156; ++i)
      if (row.labels[i] >= 1000) {
        spans.at(sentinel).push_back(row.labels[i]);
      } else {
        sentinel = row.labels[i];
        EXPECT_EQ(sentinel, 999 - static_cast<std::int32_t>(spans.size()));
        spans[sentinel];
      }
    std::vector<std::int32_t> whole;
    for (std::size_t i = 0; i < 127; ++i) {
      if (row.tokens[i] >= 1000)
        whole.push_back(row.tokens[i]);
      else
        whole.insert(whole.end(), spans.at(row.tokens[i]).begin(), spans.at(row.tokens[i]).end());
    }
    SampleRow plain;
    text->load(position, plain);
    ASSERT_EQ(whole, plain.tokens);
    EXPECT_GE(row.tokens[0], 1000) << "a text begins with what stays";
  }
}

/// All compositions of n tokens into k spans have the same chance, so that the chance of a length l is
/// C(n-l-1, k-2)/C(n-1, k-1).
TEST(SpanSamples, LengthsOfSpansHaveTheChancesOfTheRecipe) {
  const SpanLengths lengths = span_lengths(128, 0.15, 3);  // 21 tokens in 7 spans
  ASSERT_EQ(lengths.noise, 21);
  ASSERT_EQ(lengths.spans, 7);
  const SpanSamples samples(std::make_shared<CountingText>(lengths.tokens), options_of(128, 157));
  std::map<std::int64_t, std::int64_t> found;
  std::map<std::size_t, std::int64_t> last;
  constexpr std::int64_t rows = 4000;
  for (std::int64_t position = 0; position < rows; ++position) {
    SampleRow row;
    samples.load(position, row);
    std::int64_t length = -1;
    std::size_t span = 0;
    for (std::size_t i = 128; i < 157; ++i) {
      if (row.labels[i] >= 1000) {
        ++length;
        continue;
      }
      if (length >= 0) ++found[length], last[span++] += length;
      length = 0;
    }
  }
  const auto choose = [](std::int64_t n, std::int64_t k) {
    return std::exp(std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1));
  };
  std::int64_t spans = 0;
  for (const auto& [length, count] : found) spans += count;
  ASSERT_EQ(spans, rows * 7);
  EXPECT_EQ(found.count(0), 0u);
  for (std::int64_t length = 1; length <= 10; ++length) {
    const double share = choose(21 - length - 1, 5) / choose(20, 6), n = static_cast<double>(spans);
    EXPECT_NEAR(static_cast<double>(found[length]), n * share, 5 * std::sqrt(n * share)) << length;
  }
  for (const auto& [span, total] : last)  // no place has longer ones
    EXPECT_NEAR(static_cast<double>(total) / rows, 3, 0.2) << span;
}

TEST(SpanSamples, SentinelsAreNamedOrBehindTheVocabulary) {
  const auto bytes = make_byte_tokenizer();  // 257 ids
  const std::vector<std::int32_t> found = sentinels_of(*bytes, 400, 3);
  EXPECT_EQ(found, (std::vector<std::int32_t>{356, 355, 354}));
  expect_error(ErrorKind::config, "set it to 357 or more", [&] { sentinels_of(*bytes, 300, 3); });
  expect_error(ErrorKind::config, "has room for 100", [&] { sentinels_of(*bytes, 400, 101); });
  expect_error(ErrorKind::config, "set model.seq_length to 157",
               [] { SpanSamples(std::make_shared<CountingText>(141), options_of(128, 150)); });
}

class Answers : public ::testing::Test {
 protected:
  /// Sequences of prompt and answer tokens; 49 in an answer is no target.
  std::shared_ptr<const IndexedDataset> write(
      const std::vector<std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>>& pairs) {
    const std::string prefix = (folder_.path() / "pairs").string();
    DatasetBuilder builder(prefix, 50);
    for (const auto& [prompt, answer] : pairs) {
      std::vector<std::int32_t> ids = prompt;
      ids.insert(ids.end(), answer.begin(), answer.end());
      std::vector<std::uint8_t> targets(prompt.size(), 0);
      for (const std::int32_t id : answer) targets.push_back(id != 49);
      builder.add(ids, true, targets);
    }
    const auto count = static_cast<std::int64_t>(pairs.size());
    const DatasetInfo info{
        "byte", 50, 1, "uint16", builder.counts().tokens, count, count, 0, 0, builder.counts().masked, ""};
    builder.finish([&] { write_dataset_info(prefix, info); });
    return IndexedDataset::open(prefix);
  }
  testing::TempFolder folder_;
  AnswerOptions options_{.source = 5, .places = 9, .shuffle = false, .vocab_size = 50, .start = 0, .end = 1};
};

TEST_F(Answers, LieBehindTheirPrompts) {
  const auto dataset = write({{{7, 8, 9}, {10, 11, 1}},
                              {{12, 1}, {13}},
                              {{20, 21, 22, 23, 24, 25}, {30, 31, 32, 33, 34}},
                              {{40}, {}}});
  const AnswerSamples samples(dataset, {0, 4}, options_);
  ASSERT_EQ(samples.samples_per_round(), 3) << "nothing is learned of the last";
  EXPECT_EQ(samples.cut(), 1);
  EXPECT_TRUE(samples.traits().tells_sources);
  SampleRow row;
  const auto n = no_label;
  samples.load(0, row);
  EXPECT_EQ(row.tokens, (std::vector<std::int32_t>{7, 8, 9, 1, 1, 0, 10, 11, 1}));
  EXPECT_EQ(row.labels, (std::vector<std::int32_t>{n, n, n, n, n, 10, 11, 1, n}));
  EXPECT_EQ(row.source, 4);
  EXPECT_EQ(row.filling, 1);
  samples.load(1, row);
  EXPECT_EQ(row.tokens, (std::vector<std::int32_t>{12, 1, 1, 1, 1, 0, 13, 1, 1}));
  EXPECT_EQ(row.labels, (std::vector<std::int32_t>{n, n, n, n, n, 13, 1, n, n}));
  EXPECT_EQ(row.source, 2) << "an end that is there";
  samples.load(2, row);
  EXPECT_EQ(row.tokens, (std::vector<std::int32_t>{20, 21, 22, 23, 1, 0, 30, 31, 32}));
  EXPECT_EQ(row.labels, (std::vector<std::int32_t>{n, n, n, n, n, 30, 31, 32, 1}));
  EXPECT_EQ(row.source, 5);
  EXPECT_EQ(row.filling, 0);
  EXPECT_EQ(samples.tokens_before(3), samples.tokens());
}

TEST_F(Answers, OfConversationsHaveTheLabelsOfTheMask) {
  const AnswerSamples samples(write({{{7}, {10, 49, 11}}}), {0, 1}, options_);
  SampleRow row;
  samples.load(0, row);
  const auto n = no_label;
  EXPECT_EQ(row.tokens, (std::vector<std::int32_t>{7, 1, 1, 1, 1, 0, 10, 49, 11}));
  EXPECT_EQ(row.labels, (std::vector<std::int32_t>{n, n, n, n, n, 10, n, 11, 1}));
}

TEST_F(Answers, EveryRoundHasAllInAnotherOrder) {
  std::vector<std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>> pairs;
  for (std::int32_t i = 0; i < 20; ++i) pairs.push_back({{5 + i}, {5 + i, 30}});
  options_.shuffle = true;
  const AnswerSamples samples(write(pairs), {0, 20}, options_);
  std::vector<std::vector<std::int32_t>> rounds(3);
  for (std::int64_t position = 0; position < 60; ++position) {
    SampleRow row;
    samples.load(position, row);
    EXPECT_EQ(row.tokens[0], row.labels[5]) << "an answer to another prompt";
    rounds[static_cast<std::size_t>(position / 20)].push_back(row.tokens[0]);
  }
  EXPECT_NE(rounds[0], rounds[1]);
  for (auto& round : rounds) {
    std::sort(round.begin(), round.end());
    for (std::int32_t i = 0; i < 20; ++i) EXPECT_EQ(round[static_cast<std::size_t>(i)], 5 + i);
  }
}

/// A model's batch, of samples blended too.
TEST_F(Answers, BatchesTellHowLongSourcesAre) {
  const auto samples = std::make_shared<AnswerSamples>(write({{{7, 8, 9}, {10}}, {{12}, {13}}}),
                                                       SequenceRange{0, 2}, options_);
  test::Cpu cpu;
  for (const auto& each : {std::shared_ptr<const Samples>(samples),
                           std::shared_ptr<const Samples>(std::make_shared<BlendedSamples>(
                               std::vector<std::shared_ptr<const Samples>>{samples}, std::vector{1.0}))}) {
    TokenLoader loader(each, {.micro_batch = 2}, *cpu.device);
    const tensor::Batch batch = loader.next();
    EXPECT_EQ(cpu.values(batch.at("source_lengths")), (std::vector<double>{4, 2}));
    EXPECT_EQ(batch.at("tokens").shape(), (tensor::Shape{2, 9}));
  }
}

TEST_F(Answers, AreTold) {
  expect_error(ErrorKind::data, "has no prompt with an answer", [&] {
    AnswerSamples(write({{{7, 8}, {}}}), {0, 1}, options_);
  });
  const std::string prefix = (folder_.path() / "plain").string();
  DatasetBuilder builder(prefix, 50);
  builder.add(std::vector<std::int32_t>{3, 4, 5});
  builder.finish();
  expect_error(ErrorKind::data, "does not tell prompts from answers", [&] {
    AnswerSamples(IndexedDataset::open(prefix), {0, 1}, options_);
  });
}

}  // namespace
}  // namespace sherd::data

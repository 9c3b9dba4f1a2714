// Pairs of texts for a head that tells whether the second goes on with the first: against the documents that
// they are cut out of, and the recipe's shares (Devlin et al. 2019, A.2).
#include "data/packing/pair_samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "data/blend.h"
#include "data/dataset_builder.h"
#include "data/loader.h"
#include "data/packing/masked_samples.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::data {
namespace {

constexpr std::int32_t pair_begin = 1, pair_end = 2, first_id = 10;
constexpr std::int64_t ids = 10000;

/// Documents whose tokens count up through all of them, so that a token tells its document and place.
class TextPairs : public ::testing::Test {
 protected:
  std::shared_ptr<const IndexedDataset> dataset(const std::vector<int>& lengths, bool with_ends = true) {
    const std::string prefix = (folder_.path() / std::to_string(made_++)).string();
    DatasetBuilder builder(prefix, ids);
    std::int32_t next = first_id;
    for (const int length : lengths) {
      std::vector<std::int32_t> text;
      if (with_ends) text.push_back(pair_begin);
      for (int i = 0; i < length; ++i) document_of_.push_back(made_documents_), text.push_back(next++);
      ++made_documents_;
      if (with_ends) text.push_back(pair_end);
      builder.add(text);
    }
    builder.finish();
    return IndexedDataset::open(prefix);
  }
  int document_of(std::int32_t id) const { return document_of_.at(static_cast<std::size_t>(id - first_id)); }

  static PairOptions options(std::int64_t seq_length) {
    PairOptions out;
    out.seq_length = seq_length, out.begin = pair_begin, out.end = pair_end, out.vocab_size = ids;
    return out;
  }

  sherd::testing::TempFolder folder_;
  int made_ = 0, made_documents_ = 0;
  std::vector<int> document_of_;
};

/// A row taken apart.
struct Parts {
  std::vector<std::int32_t> a, b;
};
Parts parts_of(const SampleRow& row) {
  Parts out;
  EXPECT_EQ(row.tokens.front(), pair_begin);
  const auto end = row.tokens.end() - row.filling;
  const auto middle = std::find(row.tokens.begin(), end, pair_end);
  out.a.assign(row.tokens.begin() + 1, middle);
  out.b.assign(middle + 1, end - 1);
  EXPECT_EQ(*(end - 1), pair_end);
  EXPECT_EQ(std::count(row.tokens.begin(), end, pair_end), 2);
  for (auto at = row.tokens.begin(); at != row.tokens.end(); ++at)
    EXPECT_EQ(row.types[static_cast<std::size_t>(at - row.tokens.begin())], at > middle && at < end ? 1 : 0);
  return out;
}

bool counts_up(const std::vector<std::int32_t>& text) {
  return std::adjacent_find(text.begin(), text.end(), [](int x, int y) { return y != x + 1; }) == text.end();
}

TEST_F(TextPairs, TheSecondGoesOnOrIsOfAnotherDocument) {
  for (const bool with_ends : {true, false}) {
    document_of_.clear(), made_documents_ = 0;
    const auto set = dataset({40, 7, 2, 1, 100, 33, 64, 5}, with_ends);
    const PairSamples samples(set, {0, set->sequences()}, options(32));
    EXPECT_EQ(samples.seq_length(), 32);
    EXPECT_TRUE(samples.traits().keeps_documents_apart && samples.traits().pairs_texts);
    // Pieces of 29 tokens: 2 + 1 + 1 + 0 + 4 + 2 + 3 + 1.
    ASSERT_EQ(samples.samples_per_round(), 14);
    std::set<std::int32_t> begun;
    for (std::int64_t position = 0; position < 14 * 40; ++position) {
      SampleRow row, again;
      samples.load(position, row), samples.load(position, again);
      ASSERT_EQ(row.tokens, again.tokens);
      ASSERT_EQ(row.sentence, again.sentence);
      ASSERT_EQ(row.tokens.size(), 32u);
      ASSERT_EQ(row.labels, std::vector<std::int32_t>(32, no_label));
      const auto [a, b] = parts_of(row);
      ASSERT_GE(a.size(), 1u);
      ASSERT_GE(b.size(), 1u);
      ASSERT_TRUE(counts_up(a) && counts_up(b));
      for (const auto* text : {&a, &b})
        ASSERT_EQ(document_of(text->front()), document_of(text->back())) << "a text is of one document";
      if (row.sentence == 0)
        ASSERT_EQ(b.front(), a.back() + 1);
      else
        ASSERT_NE(document_of(a.front()), document_of(b.front()));
      ASSERT_EQ(row.ends.front(), 32 - row.filling);
      ASSERT_EQ(row.ends.back(), 32);
      if (position < 14) ASSERT_TRUE(begun.insert(a.front()).second) << "each piece once a round";
    }
  }
}

/// Half of the pairs go on, a tenth is shorter, and every cut has the same chance.
TEST_F(TextPairs, SharesAreTheRecipes) {
  const auto set = dataset(std::vector<int>(20, 29));
  const PairSamples samples(set, {0, 20}, options(32));
  ASSERT_EQ(samples.samples_per_round(), 20);
  constexpr int n = 40000;
  int goes_on = 0, shorter = 0, other_full = 0;
  std::map<std::size_t, int> cuts;
  std::map<int, int> others;
  for (std::int64_t position = 0; position < n; ++position) {
    SampleRow row;
    samples.load(position, row);
    const auto [a, b] = parts_of(row);
    if (row.sentence == 1) {
      ++others[document_of(b.front())];
      other_full += row.filling == 0;
      continue;
    }
    ++goes_on;
    if (row.filling > 0)
      ++shorter;
    else
      ++cuts[a.size()];
  }
  const auto near = [](double found, double chance, double of) {
    EXPECT_NEAR(found, chance * of, 5 * std::sqrt(of * chance * (1 - chance)));
  };
  near(goes_on, 0.5, n);
  // A shorter pair draws its length from 2 to 29, and 29 is not shorter.
  near(shorter, 0.1 * 27 / 28, goes_on);
  near(other_full, 1 - 0.1 * 27 / 28, n - goes_on);  // so that a row's length does not tell
  ASSERT_EQ(cuts.size(), 28u);
  for (const auto& [length, count] : cuts) near(count, 1.0 / 28, goes_on - shorter);
  ASSERT_EQ(others.size(), 20u);
  for (const auto& [document, count] : others) near(count, 1.0 / 20, n - goes_on);
}

/// Ids that go on with a word: those that no multiple of 4 is.
TEST_F(TextPairs, TextsBeginWithWords) {
  const auto set = dataset(std::vector<int>(12, 80));
  PairOptions how = options(32);
  how.goes_on.assign(static_cast<std::size_t>(ids), false);
  for (std::size_t id = 0; id < how.goes_on.size(); ++id) how.goes_on[id] = id % 4 != 0;
  const PairSamples samples(set, {0, 12}, how);
  int words = 0, rows = 0;
  for (std::int64_t position = 0; position < 2000; ++position) {
    SampleRow row;
    samples.load(position, row);
    const auto [a, b] = parts_of(row);
    if (a.size() + b.size() < 8) continue;  // perhaps without a word to begin with
    ++rows, words += b.front() % 4 == 0;
    if (row.sentence == 0) ASSERT_EQ(b.front(), a.back() + 1);
  }
  EXPECT_GT(words, 0.97 * rows);
  EXPECT_GT(rows, 1500);
}

TEST_F(TextPairs, RoundsTakeOtherOrders) {
  const auto set = dataset(std::vector<int>(30, 29));
  PairOptions how = options(32);
  const auto firsts = [&](const PairSamples& samples, std::int64_t round) {
    std::vector<int> out;
    for (std::int64_t i = 0; i < 30; ++i) {
      SampleRow row;
      samples.load(30 * round + i, row);
      out.push_back(document_of(parts_of(row).a.front()));
    }
    return out;
  };
  const PairSamples shuffled(set, {0, 30}, how);
  EXPECT_NE(firsts(shuffled, 0), firsts(shuffled, 1));
  auto sorted = firsts(shuffled, 1);
  std::sort(sorted.begin(), sorted.end());
  how.shuffle = false;
  EXPECT_EQ(firsts(PairSamples(set, {0, 30}, how), 0), sorted);
  EXPECT_EQ(shuffled.tokens(), 30 * 32);
  EXPECT_EQ(shuffled.tokens_before(35), 35 * 32);
}

TEST_F(TextPairs, RefusesWhatHasNone) {
  const auto one = dataset({50, 1});
  expect_error(ErrorKind::data, "pairs of texts take at least two", [&] {
    PairSamples(one, {0, 2}, options(32));
  });
  const auto two = dataset({50, 20});
  expect_error(ErrorKind::config, "raise model.seq_length", [&] { PairSamples(two, {0, 2}, options(4)); });
  PairOptions few = options(32);
  few.vocab_size = 20;
  const PairSamples unknown(two, {0, 2}, few);
  SampleRow row;
  expect_error(ErrorKind::data, "20", [&] { unknown.load(0, row); });
}

/// Masked and blended as any samples, with a label at each pair's first token.
TEST_F(TextPairs, ComeInBatches) {
  test::Cpu cpu(1);
  const auto set = dataset({60, 60, 60, 9});
  const auto pairs = std::make_shared<PairSamples>(set, SequenceRange{0, 4}, options(32));
  const auto others = dataset({50, 50, 50});
  const auto both = std::make_shared<BlendedSamples>(
      std::vector<std::shared_ptr<const Samples>>{
          pairs, std::make_shared<PairSamples>(others, SequenceRange{0, 3}, options(32))},
      std::vector<double>{1, 1});
  int alike = 0;
  for (std::int64_t position = 0; position < 400; position += 2) {
    SampleRow one, other;
    both->load(position, one), both->load(position + 1, other);
    alike += one.sentence == other.sentence;
  }
  EXPECT_NEAR(alike, 100, 40) << "datasets draw numbers of their own";
  MaskingOptions masking{
      .probability = 0.3, .vocab_size = ids, .mask_token = 3, .special = {}, .goes_on = {}};
  masking.special.assign(static_cast<std::size_t>(ids), false);
  masking.special[pair_begin] = masking.special[pair_end] = true;
  const auto masked = std::make_shared<MaskedSamples>(both, masking);
  ASSERT_TRUE(masked->traits().pairs_texts);
  TokenLoader loader(masked, {.micro_batch = 4}, *cpu.device);
  const tensor::Batch batch = loader.next();
  const std::vector<double> labels = cpu.values(batch.at("sentence_labels")),
                            types = cpu.values(batch.at("token_types")),
                            targets = cpu.values(batch.at("labels")), tokens = cpu.values(batch.at("tokens"));
  ASSERT_EQ(labels.size(), 128u);
  int learned = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    SampleRow row;
    both->load(static_cast<std::int64_t>(i / 32), row);
    EXPECT_EQ(labels[i], i % 32 == 0 ? row.sentence : no_label);
    EXPECT_EQ(types[i], row.types[i % 32]);
    const bool is_target = targets[i] != no_label;
    EXPECT_EQ(is_target ? targets[i] : tokens[i], row.tokens[i % 32]);
    learned += is_target;
    if (row.tokens[i % 32] <= pair_end) EXPECT_EQ(targets[i], no_label);
  }
  EXPECT_GT(learned, 5);
  // Rows behind the end of a pass teach nothing.
  loader.seek(loader.samples_per_epoch() - 2);
  const CountedBatch last = loader.next_of_pass();
  EXPECT_EQ(last.samples, 2);
  const std::vector<double> counted = cpu.values(last.batch.at("sentence_labels"));
  EXPECT_NE(counted[32], no_label);
  EXPECT_EQ(counted[64], no_label);
}

}  // namespace
}  // namespace sherd::data

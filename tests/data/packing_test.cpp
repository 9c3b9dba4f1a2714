#include "data/packing/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "data/packing/legacy_random.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::TempFolder;
using Indices = std::vector<std::int64_t>;

Indices shuffled(LegacyRandom& random, std::int64_t count) {
  Indices items(static_cast<std::size_t>(count));
  std::iota(items.begin(), items.end(), 0);
  random.shuffle(std::span(items));
  return items;
}

// numpy 2: r = numpy.random.RandomState(seed); a = numpy.arange(16); r.shuffle(a); b = numpy.arange(5);
// r.shuffle(b)
TEST(LegacyRandom, ShufflesAsNumPyDoes) {
  LegacyRandom zero(0);
  EXPECT_EQ(shuffled(zero, 16), (Indices{1, 6, 8, 9, 13, 4, 2, 14, 10, 7, 15, 11, 3, 0, 5, 12}));
  EXPECT_EQ(shuffled(zero, 5), (Indices{4, 0, 3, 2, 1}));
  LegacyRandom usual(1234);
  EXPECT_EQ(shuffled(usual, 16), (Indices{13, 11, 0, 12, 14, 2, 10, 7, 1, 9, 8, 4, 5, 6, 3, 15}));
  EXPECT_EQ(shuffled(usual, 5), (Indices{1, 0, 3, 4, 2}));
  LegacyRandom last(4294967295u);
  EXPECT_EQ(shuffled(last, 16), (Indices{8, 1, 5, 11, 9, 14, 15, 13, 10, 6, 0, 4, 7, 12, 2, 3}));
  EXPECT_EQ(shuffled(last, 5), (Indices{2, 0, 3, 4, 1}));
}

TEST(LegacyRandom, ShufflesALongListAsNumPyDoes) {
  LegacyRandom random(7);
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const std::int64_t item : shuffled(random, 100000))
    hash = (hash ^ static_cast<std::uint64_t>(item)) * 0x100000001b3ull;
  EXPECT_EQ(hash, 0xb57dd85d36a86337ull);
  LegacyRandom again(7);
  IndexList list(0, 100000);
  list.shuffle(again, 0, 100000);
  LegacyRandom third(7);
  const Indices expected = shuffled(third, 100000);
  for (std::int64_t i = 0; i < list.size(); ++i) ASSERT_EQ(list[i], expected[static_cast<std::size_t>(i)]);
}

// numpy 2: numpy.random.RandomState(5).randint(0, 3 * 2**38 + 1, size=4, dtype=numpy.int64)
TEST(LegacyRandom, DrawsTwoWordsBeyond32Bits) {
  LegacyRandom random(5);
  for (const std::uint64_t expected : {425438759118ull, 622681974857ull, 34745516772ull, 667240942192ull})
    EXPECT_EQ(random.interval(3ull << 38), expected);
}

const std::vector<std::int32_t> lengths{7, 3, 11, 1, 6, 9, 2, 13};  // 52 tokens

void expect_orders(std::int64_t total_samples, std::int64_t epochs, const Indices& sequences,
                   const Indices& samples) {
  TempFolder folder;
  const auto dataset = counting_dataset(folder, lengths);
  const PackedSamples packed(dataset, {0, 8},
                             {.seq_length = 5, .seed = 1234, .total_samples = total_samples});
  EXPECT_EQ(packed.epochs_per_round(), epochs);
  EXPECT_EQ(packed.sequence_order(0), sequences);
  ASSERT_EQ(packed.samples_per_round(), static_cast<std::int64_t>(samples.size()));
  for (std::size_t i = 0; i < samples.size(); ++i)
    EXPECT_EQ(packed.sample_at(static_cast<std::int64_t>(i)), samples[i]) << i;
}

// From a transcription of Megatron Core's GPTDataset into a few lines of numpy: these lengths, seed 1234, 5
// tokens.
TEST(PackedSamples, HasMegatronsOrders) {
  expect_orders(0, 1, {2, 1, 6, 0, 4, 5, 3, 7}, {8, 5, 6, 0, 4, 3, 2, 9, 7, 1});
  expect_orders(20, 2, {5, 3, 0, 4, 6, 2, 2, 7, 1, 1, 0, 4, 5, 6, 3, 7},
                {7, 10, 4, 1, 12, 8, 3, 17, 14, 13, 18, 11, 0, 2, 6, 15, 9, 19, 5, 16});
}

TEST(PackedSamples, ShufflesALittleUsedLastEpochApart) {
  expect_orders(23, 3, {5, 3, 0, 4, 6, 2, 2, 7, 1, 1, 0, 4, 5, 6, 3, 7, 5, 1, 3, 4, 0, 7, 6, 2},
                {4,  13, 14, 17, 8,  1,  0,  18, 7,  3,  10, 6,  2,  5,  12, 11,
                 19, 15, 9,  16, 28, 20, 25, 27, 22, 24, 29, 26, 30, 23, 21});
  expect_orders(31, 3, {7, 0, 2, 3, 1, 2, 5, 4, 0, 0, 5, 5, 2, 6, 4, 6, 3, 1, 1, 7, 4, 6, 3, 7},
                {23, 29, 19, 25, 8,  14, 4, 21, 10, 17, 13, 1,  26, 30, 24, 22,
                 28, 20, 9,  0,  11, 7,  3, 6,  2,  5,  12, 27, 16, 18, 15});
}

/// The stream that a round packs, read straight from the dataset.
std::vector<std::int32_t> stream(const IndexedDataset& dataset, const Indices& order) {
  std::vector<std::int32_t> tokens;
  for (const std::int64_t sequence : order) {
    std::vector<std::int32_t> part(static_cast<std::size_t>(dataset.length(sequence)));
    dataset.read(sequence, 0, part);
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  return tokens;
}

TEST(PackedSamples, ReadsAcrossDocuments) {
  TempFolder folder;
  std::vector<std::int32_t> many;
  for (int i = 0; i < 500; ++i) many.push_back((i * 37) % 23);  // zero-length sequences among them
  const auto dataset = counting_dataset(folder, many);
  for (const bool shuffle : {true, false})
    for (const std::int64_t s : {1, 4, 100, 4000}) {
      const PackedSamples packed(dataset, {3, 490}, {.seq_length = s, .seed = 9, .shuffle = shuffle});
      const std::int64_t samples = packed.samples_per_round();
      EXPECT_EQ(samples, (packed.tokens() - 1) / s);
      for (const std::int64_t round : {0, 1, 5}) {
        const auto tokens = stream(*dataset, packed.sequence_order(round));
        ASSERT_EQ(static_cast<std::int64_t>(tokens.size()), packed.tokens());
        std::set<std::int64_t> seen;
        for (std::int64_t place = 0; place < samples; place += s == 1 ? 29 : 1) {
          SampleRow row;
          packed.load(round * samples + place, row);
          const std::int64_t index = packed.sample_at(round * samples + place);
          EXPECT_TRUE(seen.insert(index).second);
          ASSERT_TRUE(std::equal(row.tokens.begin(), row.tokens.end(), tokens.begin() + index * s) &&
                      std::equal(row.labels.begin(), row.labels.end(), tokens.begin() + index * s + 1))
              << s << " " << place;
        }
      }
    }
}

/// A sample has fewer tokens of text then, behind the same virtual ones, and one target more.
TEST(PackedSamples, StandBehindVirtualTokens) {
  testing::TempFolder folder;
  const auto dataset = counting_dataset(folder, {7, 12, 9, 30});
  const PackedSamples plain(dataset, {0, 4}, {.seq_length = 6, .shuffle = false}),
      prompted(dataset, {0, 4}, {.seq_length = 9, .shuffle = false, .prompt = {.first = 70'000, .count = 3}});
  EXPECT_EQ(prompted.seq_length(), 9);
  ASSERT_EQ(prompted.samples_per_round(), plain.samples_per_round());
  for (std::int64_t p = 0; p < plain.samples_per_round(); ++p) {
    SampleRow row, want;
    plain.load(p, want), prompted.load(p, row);
    want.tokens.insert(want.tokens.begin(), {70'000, 70'001, 70'002});
    want.labels.insert(want.labels.begin(), {no_label, no_label, want.tokens[3]});
    EXPECT_EQ(row.tokens, want.tokens);
    EXPECT_EQ(row.labels, want.labels);
  }
  testing::expect_error(ErrorKind::config, "with 6 virtual tokens", [&] {
    PackedSamples(dataset, {0, 4}, {.seq_length = 6, .prompt = {.first = 70'000, .count = 6}});
  });
}

TEST(PackedSamples, RoundsDiffer) {
  TempFolder folder;
  const auto dataset = counting_dataset(folder, lengths);
  const PackedSamples packed(dataset, {0, 8}, {.seq_length = 5, .seed = 1234});
  const PackedSamples next(dataset, {0, 8}, {.seq_length = 5, .seed = 1235});
  EXPECT_NE(packed.sequence_order(0), packed.sequence_order(1));
  EXPECT_EQ(packed.sequence_order(1), next.sequence_order(0));
  EXPECT_EQ(packed.sequence_order(0), (Indices{2, 1, 6, 0, 4, 5, 3, 7}))
      << "after other rounds were asked for";
}

TEST(PackedSamples, ChecksTheVocabulary) {
  TempFolder folder;
  const auto dataset = counting_dataset(folder, lengths);
  SampleRow row;
  PackedSamples(dataset, {0, 8}, {.seq_length = 51, .vocab_size = 52}).load(0, row);
  expect_error(ErrorKind::data, "is 51, beyond the vocabulary of 51", [&] {
    PackedSamples(dataset, {0, 8}, {.seq_length = 51, .vocab_size = 51}).load(0, row);
  });
}

TEST(PackedSamples, RefusesARangeThatIsTooShort) {
  TempFolder folder;
  const auto dataset = counting_dataset(folder, lengths);
  EXPECT_EQ(PackedSamples(dataset, {0, 8}, {.seq_length = 51}).samples_per_round(), 1);
  expect_error(ErrorKind::data, "the validation split of", [&] {
    PackedSamples(dataset, {0, 8}, {.seq_length = 52}, "validation split");
  });
  expect_error(ErrorKind::data, "0 tokens", [&] { PackedSamples(dataset, {8, 8}, {.seq_length = 1}); });
  expect_error(ErrorKind::config, "sequence length", [&] {
    PackedSamples(dataset, {0, 8}, {.seq_length = 0});
  });
}

TEST(SplitSequences, RoundsHalfToEven) {
  const std::vector<double> usual{0.969, 0.03, 0.001};
  EXPECT_EQ(split_sequences(1000, usual), (std::vector<SequenceRange>{{0, 969}, {969, 999}, {999, 1000}}));
  const std::vector<double> halves{0.5, 0.5};
  EXPECT_EQ(split_sequences(5, halves), (std::vector<SequenceRange>{{0, 2}, {2, 5}}));
  EXPECT_EQ(split_sequences(7, halves), (std::vector<SequenceRange>{{0, 4}, {4, 7}}));
  const std::vector<double> part{0.25, 0.25};
  EXPECT_EQ(split_sequences(100, part), (std::vector<SequenceRange>{{0, 25}, {25, 50}}));
  const std::vector<double> tenths(10, 0.1);
  EXPECT_EQ(split_sequences(33, tenths).back().end, 33);
}

TEST(SplitSequences, RefusesWhatIsNoSplit) {
  for (const std::vector<double>& bad :
       {std::vector<double>{0.9, 0.2}, {-0.1, 0.5}, {0, 0}, {}, {std::nan("")}})
    expect_error(ErrorKind::config, "data.split", [&] { split_sequences(10, bad); });
}

}  // namespace
}  // namespace sherd::data

#include "data/packing/document_packing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "base/random.h"
#include "data/dataset_info.h"
#include "data/loader.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::TempFolder;
using Ids = std::vector<std::int32_t>;

constexpr std::int32_t padding = 1'999'999;

class DocumentPacking : public ::testing::Test {
 protected:
  std::shared_ptr<const DocumentSamples> samples(const std::vector<std::int32_t>& lengths,
                                                 PackingOptions options) {
    dataset_ = counting_dataset(folder_, lengths, 2'000'000);
    return std::make_shared<DocumentSamples>(dataset_, SequenceRange{0, dataset_->sequences()}, options,
                                             padding);
  }
  TempFolder folder_;
  std::shared_ptr<const IndexedDataset> dataset_;
};

/// A row's pairs of token and label, checked for all that holds of every row.
std::vector<std::pair<std::int32_t, std::int32_t>> pairs_of(const SampleRow& row, std::int64_t length) {
  EXPECT_EQ(row.tokens.size(), static_cast<std::size_t>(length));
  EXPECT_EQ(row.labels.size(), static_cast<std::size_t>(length));
  EXPECT_EQ(row.ends.back(), length);
  std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
  std::int32_t begin = 0;
  for (const std::int32_t end : row.ends) {
    EXPECT_LT(begin, end);
    const bool is_padding = row.tokens[static_cast<std::size_t>(begin)] == padding;
    EXPECT_TRUE(!is_padding || end == length) << "padding comes last";
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      EXPECT_EQ(row.labels[i], is_padding ? no_label : row.tokens[i] + 1) << "of a dataset that counts";
      if (i > static_cast<std::size_t>(begin) && !is_padding) {
        EXPECT_EQ(row.tokens[i], row.tokens[i - 1] + 1);
      }
      if (!is_padding) pairs.emplace_back(row.tokens[i], row.labels[i]);
    }
    begin = end;
  }
  return pairs;
}

/// Every token takes a place and is its own label, none is a label alone.
TEST_F(DocumentPacking, GivesPlacesToAllTokensWhereTheseAreTheTargets) {
  const std::vector<std::int32_t> lengths{5, 1, 9, 2, 10, 30, 8, 3};
  const auto packed = samples(lengths, {.seq_length = 11, .shuffle = false, .targets = Targets::tokens});
  std::map<std::int32_t, int> read;
  for (std::int64_t p = 0; p < packed->samples_per_round(); ++p) {
    SampleRow row;
    packed->load(p, row);
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      if (row.tokens[i] == padding) continue;
      ++read[row.tokens[i]];
      EXPECT_EQ(row.labels[i], row.tokens[i]);
    }
    EXPECT_TRUE(row.types.empty());
  }
  EXPECT_EQ(read.size(), 68u);
  for (const auto& [token, times] : read) EXPECT_EQ(times, 1) << token;
}

/// The last id of a document is the label of its first token; of a long one the beginning is taken.
TEST_F(DocumentPacking, PutsClassesAtFirstTokens) {
  const std::vector<std::int32_t> lengths{5, 9, 2, 30, 8, 12, 13};
  const auto packed = samples(lengths, {.seq_length = 11, .shuffle = false, .targets = Targets::classes});
  EXPECT_EQ(packed->cut(), 2);  // of 30 and 13 ids
  std::set<std::int32_t> begins;
  for (std::int64_t p = 0; p < packed->samples_per_round(); ++p) {
    SampleRow row;
    packed->load(p, row);
    ASSERT_EQ(row.types.size(), row.tokens.size());
    std::int32_t begin = 0;
    for (const std::int32_t end : row.ends) {
      const std::int32_t first = row.tokens[static_cast<std::size_t>(begin)];
      std::int32_t of = 0;  // the document's first token
      for (const std::int32_t length : lengths) {
        if (first == of) {
          begins.insert(first);
          EXPECT_EQ(end - begin, std::min(length - 1, 11));
          EXPECT_EQ(row.labels[static_cast<std::size_t>(begin)], of + length - 1);
        }
        of += length;
      }
      for (std::int32_t i = begin + 1; i < end; ++i)
        EXPECT_EQ(row.labels[static_cast<std::size_t>(i)], no_label);
      begin = end;
    }
  }
  EXPECT_EQ(begins.size(), lengths.size());
  const Ids pair{1, 5, 6, 2, 7, 8, 2}, alone{1, 5, 2};
  EXPECT_EQ(types_of_parts(pair, 2), (Ids{0, 0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(types_of_parts(alone, 2), (Ids{0, 0, 0}));
}

/// Each document of a row has them, and their room.
TEST_F(DocumentPacking, StandsBehindVirtualTokens) {
  const std::vector<std::int32_t> lengths{5, 1, 9, 2, 10, 30, 8, 3};
  const auto packed =
      samples(lengths, {.seq_length = 11, .shuffle = false, .prompt = {.first = 3'000'000, .count = 3}});
  std::map<std::int32_t, int> read, learned;
  for (std::int64_t p = 0; p < packed->samples_per_round(); ++p) {
    SampleRow row;
    packed->load(p, row);
    std::int32_t begin = 0;
    for (const std::int32_t end : row.ends) {
      const auto at = [&](std::int32_t i) { return static_cast<std::size_t>(begin + i); };
      if (row.tokens[at(0)] != padding) {
        ASSERT_GT(end - begin, 3);
        for (std::int32_t i = 0; i < 3; ++i) EXPECT_EQ(row.tokens[at(i)], 3'000'000 + i);
        EXPECT_EQ(row.labels[at(0)], no_label);
        EXPECT_EQ(row.labels[at(1)], no_label);
        EXPECT_EQ(row.labels[at(2)], row.tokens[at(3)]) << "the text's first token";
        for (std::int32_t i = 3; i < end - begin; ++i) ++read[row.tokens[at(i)]];
        for (std::int32_t i = 2; i < end - begin; ++i) ++learned[row.labels[at(i)]];
      }
      begin = end;
    }
  }
  std::int32_t token = 0;
  for (const std::int32_t length : lengths) {
    for (std::int32_t i = 0; length > 1 && i < length; ++i) {
      EXPECT_EQ(read[token + i], i + 1 < length ? 1 : 0) << token + i;
      // A piece begins with the last target of the one before, and learns it again.
      EXPECT_EQ(learned[token + i], i > 0 && i % 8 == 0 && i + 1 < length ? 2 : 1) << token + i;
    }
    token += length;
  }
}

TEST_F(DocumentPacking, LearnsEveryTokenBehindAnotherOncePerRound) {
  const std::vector<std::int32_t> lengths{5, 1, 0, 9, 2, 10, 11, 30, 8, 3, 3, 20, 7, 2};
  for (const bool shuffle : {false, true}) {
    const auto packed_samples = samples(lengths, {.seq_length = 9, .seed = 5, .shuffle = shuffle});
    const DocumentSamples& packed = *packed_samples;
    std::map<std::int32_t, int> seen;
    for (std::int64_t p = 0; p < 3 * packed.samples_per_round(); ++p) {
      SampleRow row;
      packed.load(p, row);
      for (const auto& [token, label] : pairs_of(row, 9)) ++seen[token];
    }
    std::int32_t token = 0;
    for (const std::int32_t length : lengths) {
      for (std::int32_t i = 0; i + 1 < length; ++i) EXPECT_EQ(seen[token + i], 3) << token + i;
      if (length > 0) {
        EXPECT_EQ(seen[token + length - 1], 0) << "the last of a document is a label alone";
      }
      token += length;
    }
  }
}

TEST_F(DocumentPacking, WastesLittle) {
  // As instruction data: most are short, a few are longer than a row.
  std::vector<std::int32_t> lengths;
  std::int64_t places = 0;
  for (std::uint64_t i = 0; i < 4000; ++i) {
    lengths.push_back(2 + static_cast<std::int32_t>(std::exp(5 + normal_at({3, 4}, i))));
    places += lengths.back() - 1;
  }
  const auto packed_samples = samples(lengths, {.seq_length = 1024, .seed = 5});
  const DocumentSamples& packed = *packed_samples;
  EXPECT_GE(packed.samples_per_round() * 1024, places);
  EXPECT_GT(packed.filled(), 0.98);
  EXPECT_DOUBLE_EQ(packed.filled(),
                   static_cast<double>(places) / static_cast<double>(packed.samples_per_round() * 1024));
}

TEST_F(DocumentPacking, IsAFunctionOfThePositionAndMixesAnewEveryRound) {
  std::vector<std::int32_t> lengths;
  for (std::uint64_t i = 0; i < 300; ++i)
    lengths.push_back(2 + static_cast<std::int32_t>(philox({1, 2}, i)[0] % 12));
  const auto one_samples = samples(lengths, {.seq_length = 32, .seed = 5});
  const DocumentSamples& one = *one_samples;
  const DocumentSamples other(dataset_, {0, dataset_->sequences()}, {.seq_length = 32, .seed = 5}, padding);
  const DocumentSamples seeded(dataset_, {0, dataset_->sequences()}, {.seq_length = 32, .seed = 6}, padding);
  const std::int64_t n = one.samples_per_round();
  const auto tokens = [](const DocumentSamples& samples, std::int64_t position) {
    SampleRow row;
    samples.load(position, row);
    return row.tokens;
  };
  int same_in_next = 0, same_of_seed = 0;
  std::vector<Ids> backwards(static_cast<std::size_t>(2 * n));
  for (std::int64_t p = 2 * n; p-- > 0;) backwards[static_cast<std::size_t>(p)] = tokens(other, p);
  for (std::int64_t p = 0; p < n; ++p) {
    EXPECT_EQ(tokens(one, p), backwards[static_cast<std::size_t>(p)]);
    same_in_next += tokens(one, p) == tokens(one, n + p);
    same_of_seed += tokens(one, p) == tokens(seeded, p);
  }
  EXPECT_LT(same_in_next, n / 10);
  EXPECT_LT(same_of_seed, n / 10);
}

TEST_F(DocumentPacking, CountsTheTokensBeforeAPosition) {
  const std::vector<std::int32_t> lengths{5, 1, 0, 9, 2, 10, 11, 30, 8, 3, 3, 20, 7, 2};
  for (const std::int64_t prompt : {0, 2})
    for (const bool shuffle : {false, true}) {
      const auto packed = samples(
          lengths,
          {.seq_length = 9, .seed = 5, .shuffle = shuffle, .prompt = {.first = 3'000'000, .count = prompt}});
      std::int64_t tokens = 0, filling = 0;
      for (std::int64_t p = 0; p < 3 * packed->samples_per_round(); ++p) {
        ASSERT_EQ(packed->tokens_before(p), tokens) << p;
        SampleRow row;
        packed->load(p, row);
        tokens += std::count_if(row.tokens.begin(), row.tokens.end(), [](auto id) { return id != padding; });
        filling += row.filling;
      }
      EXPECT_GT(filling, 0);
    }
}

TEST_F(DocumentPacking, WithoutAShuffleGoesByTheFirstDocumentOfARow) {
  const auto packed_samples = samples({4, 4, 9, 4, 9, 4}, {.seq_length = 8, .shuffle = false});
  const DocumentSamples& packed = *packed_samples;
  std::vector<std::int32_t> firsts;
  for (std::int64_t p = 0; p < packed.samples_per_round(); ++p) {
    SampleRow row;
    packed.load(p, row);
    firsts.push_back(*std::min_element(row.tokens.begin(), row.tokens.end()));
  }
  EXPECT_TRUE(std::is_sorted(firsts.begin(), firsts.end()));
}

TEST_F(DocumentPacking, BatchesSayWhereDocumentsAre) {
  const auto packed = samples({4, 6, 3, 3, 9}, {.seq_length = 8, .shuffle = false});
  const auto device = device::make_cpu_device(1);
  const tensor::Batch batch = TokenLoader(packed, {.micro_batch = 2}, *device).next();
  const auto values = [&](const char* name) {
    const tensor::Tensor& x = batch.at(name);
    return Ids(x.data<std::int32_t>(), x.data<std::int32_t>() + x.numel());
  };
  EXPECT_EQ(values("tokens"),
            (Ids{4, 5, 6, 7, 8, 0, 1, 2, 10, 11, 13, 14, padding, padding, padding, padding}));
  EXPECT_EQ(values("positions"), (Ids{0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 0, 1, 0, 1, 2, 3}));
  EXPECT_EQ(values("documents"), (Ids{0, 5, 8, 10, 12, 16}));
  EXPECT_EQ(values("filling"), (Ids{0, 4}));
  EXPECT_EQ(values("target_tokens"), Ids{12});
}

TEST_F(DocumentPacking, LeavesOutTheLabelsThatTheMaskLeavesOut) {
  const std::string prefix = (folder_ / "masked").string();
  DatasetBuilder builder(prefix, 100);
  builder.add(Ids{1, 2, 3, 4, 5}, true, std::vector<std::uint8_t>{1, 0, 0, 1, 0});
  const DatasetInfo info{"byte", 100, 0, "uint16", 5, 1, 1, 0, 0, builder.counts().masked, ""};
  builder.finish([&] { write_dataset_info(prefix, info); });
  const DocumentSamples packed(IndexedDataset::open(prefix), {0, 1}, {.seq_length = 4}, padding);
  SampleRow row;
  packed.load(0, row);
  EXPECT_EQ(row.tokens, (Ids{1, 2, 3, 4}));
  EXPECT_EQ(row.labels, (Ids{no_label, no_label, 4, no_label}))
      << "a mark is of the label, not of what it follows";
}

/// Parts of a long question are left out where a document is cut; parts with a target stay, and whole
/// documents.
TEST_F(DocumentPacking, LeavesOutPiecesWithoutATarget) {
  const std::string prefix = (folder_ / "long").string();
  DatasetBuilder builder(prefix, 100);
  builder.add(Ids{1, 2, 3, 4, 5, 6, 7, 8, 9}, true, std::vector<std::uint8_t>{0, 0, 0, 0, 0, 0, 0, 1, 0});
  builder.add(Ids{20, 21, 22}, true, std::vector<std::uint8_t>{0, 0, 0});
  const DatasetInfo info{"byte", 100, 0, "uint16", 12, 2, 2, 0, 0, builder.counts().masked, ""};
  builder.finish([&] { write_dataset_info(prefix, info); });
  const DocumentSamples packed(IndexedDataset::open(prefix), {0, 2}, {.seq_length = 4, .shuffle = false},
                               padding);
  EXPECT_EQ(packed.cut(), 1);
  ASSERT_EQ(packed.samples_per_round(), 2);
  std::set<Ids> rows;
  for (std::int64_t i = 0; i < 2; ++i) {
    SampleRow row;
    packed.load(i, row);
    rows.insert(row.tokens);
  }
  EXPECT_EQ(rows, (std::set<Ids>{{5, 6, 7, 8}, {20, 21, padding, padding}}));
}

TEST_F(DocumentPacking, RefusesWhatHoldsNothing) {
  expect_error(ErrorKind::data, "has no document with tokens to learn from in 3 sequences", [&] {
    samples({1, 0, 1}, {.seq_length = 8});
  });
  expect_error(ErrorKind::config, "at least 1, not 0", [&] { samples({4}, {.seq_length = 0}); });
  const auto packed_samples = samples({4, 4}, {.seq_length = 8, .vocab_size = 3});
  const DocumentSamples& packed = *packed_samples;
  SampleRow row;
  expect_error(ErrorKind::data, "beyond the vocabulary of 3", [&] { packed.load(0, row); });
}

}  // namespace
}  // namespace sherd::data

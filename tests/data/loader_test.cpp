#include "data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "data/dataset.h"
#include "data/packing/packing.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::TempFolder;

std::vector<std::int32_t> values(const tensor::Tensor& tensor) {
  return {tensor.data<std::int32_t>(), tensor.data<std::int32_t>() + tensor.numel()};
}

class TokenLoading : public ::testing::Test {
 protected:
  std::shared_ptr<const PackedSamples> samples(std::int64_t seq_length = 8, bool shuffle = true) const {
    return std::make_shared<PackedSamples>(
        dataset_, SequenceRange{0, dataset_->sequences()},
        PackingOptions{.seq_length = seq_length, .seed = 3, .shuffle = shuffle, .vocab_size = 60000});
  }

  TempFolder folder_;
  std::shared_ptr<const IndexedDataset> dataset_ =
      counting_dataset(folder_, std::vector<std::int32_t>(40, 17));
  std::shared_ptr<device::Device> device_ = device::make_cpu_device(1);
};

TEST_F(TokenLoading, LabelsAreTheNextTokens) {
  TokenLoader loader(samples(), {.micro_batch = 3}, *device_);
  const tensor::Batch batch = loader.next();
  EXPECT_EQ(batch.at("tokens").shape(), (tensor::Shape{3, 8}));
  EXPECT_EQ(batch.at("labels").shape(), (tensor::Shape{3, 8}));
  const auto tokens = values(batch.at("tokens")), labels = values(batch.at("labels"));
  for (std::size_t row = 0; row < 3; ++row) {
    SampleRow sample{.tokens = std::vector<std::int32_t>(8), .labels = std::vector<std::int32_t>(8)};
    samples()->load(static_cast<std::int64_t>(row), sample);
    const auto begin = static_cast<long>(row) * 8;
    EXPECT_TRUE(std::equal(sample.tokens.begin(), sample.tokens.end(), tokens.begin() + begin));
    EXPECT_TRUE(std::equal(sample.labels.begin(), sample.labels.end(), labels.begin() + begin));
    EXPECT_TRUE(std::equal(tokens.begin() + begin + 1, tokens.begin() + begin + 8, labels.begin() + begin));
  }
}

TEST_F(TokenLoading, NamesTheFileThatIsCutUnderARun) {
  TokenLoader loader(samples(), {.micro_batch = 3}, *device_);
  loader.next();
  std::filesystem::resize_file(bin_path(dataset_->prefix()), 0);
  expect_error(ErrorKind::data, "counting.bin' was cut while in use", [&] { loader.next(); });
}

/// The tokens of the first `count` samples of the global order, as `world` ranks with `micro` samples each
/// load them.
std::vector<std::int32_t> global_order(std::shared_ptr<const PackedSamples> samples, device::Device& device,
                                       int world, std::int64_t micro, std::int64_t count) {
  std::vector<std::unique_ptr<TokenLoader>> loaders;
  for (int rank = 0; rank < world; ++rank)
    loaders.push_back(std::make_unique<TokenLoader>(samples, LoaderRank{micro, rank, world}, device));
  std::vector<std::int32_t> tokens;
  while (loaders.front()->position() < count)
    for (auto& loader : loaders) {
      const auto part = values(loader->next().at("tokens"));
      tokens.insert(tokens.end(), part.begin(), part.end());
    }
  return tokens;
}

TEST_F(TokenLoading, TheGlobalOrderDoesNotDependOnTheRanks) {
  const auto packed = samples();
  const std::int64_t count = 12 * ((packed->samples_per_round() * 5 / 2) / 12);  // over two and a half rounds
  const auto alone = global_order(packed, *device_, 1, 12, count);
  EXPECT_EQ(alone, global_order(packed, *device_, 1, 1, count));
  EXPECT_EQ(alone, global_order(packed, *device_, 2, 3, count));
  EXPECT_EQ(alone, global_order(packed, *device_, 3, 4, count));
  EXPECT_EQ(alone, global_order(packed, *device_, 4, 1, count));
}

TEST_F(TokenLoading, ARoundTakesEverySampleOnce) {
  const auto packed = samples(8);
  const std::int64_t round = packed->samples_per_round();
  ASSERT_EQ(round, 84);
  for (const int world : {1, 2, 3, 4}) {
    const auto tokens = global_order(packed, *device_, world, 12 / world, round);
    std::map<std::int32_t, int> seen;
    for (const std::int32_t token : tokens) ++seen[token];
    EXPECT_EQ(seen.size(), 84u * 8u);
    for (const auto& [token, times] : seen) ASSERT_EQ(times, 1) << token;
  }
}

TEST_F(TokenLoading, ResumesAtTheSample) {
  const auto packed = samples();
  TokenLoader through(packed, {2, 1, 3}, *device_);
  for (int i = 0; i < 25; ++i) through.next();  // beyond the first round
  const std::int64_t position = through.position();
  EXPECT_EQ(position, 150);
  TokenLoader resumed(samples(), {2, 1, 3}, *device_);
  resumed.seek(position);
  for (int i = 0; i < 20; ++i) {
    const auto a = through.next(), b = resumed.next();
    ASSERT_EQ(values(a.at("tokens")), values(b.at("tokens")));
    ASSERT_EQ(values(a.at("labels")), values(b.at("labels")));
  }
  EXPECT_EQ(through.position(), resumed.position());
  expect_error(ErrorKind::usage, "position -1", [&] { resumed.seek(-1); });
}

TEST_F(TokenLoading, WhoDoesNotReadMovesOnAlike) {
  TokenLoader reads(samples(), {2, 1, 3}, *device_), moves(samples(), {2, 1, 3, false}, *device_);
  std::filesystem::resize_file(bin_path(dataset_->prefix()), 0);
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(moves.next().empty());
  EXPECT_EQ(moves.position(), 300);
  expect_error(ErrorKind::data, "was cut while in use", [&] { reads.next(); });
}

TEST_F(TokenLoading, AWindowRepeats) {
  TokenLoader loader(samples(8, false), {.micro_batch = 2}, *device_, 6);
  EXPECT_EQ(loader.samples_per_epoch(), 6);
  std::vector<std::vector<std::int32_t>> batches;
  for (int i = 0; i < 6; ++i) batches.push_back(values(loader.next().at("tokens")));
  EXPECT_EQ(batches[0].front(), 0);
  EXPECT_EQ(batches[1].front(), 16);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(batches[i], batches[i + 3]);
  EXPECT_EQ(TokenLoader(samples(), {}, *device_, 1000).samples_per_epoch(), 84);
  EXPECT_EQ(loader.tokens_before(13), 13 * 8);
}

/// Each of ten samples counts once, however many ranks take how many at a time; what is beyond has no target.
TEST_F(TokenLoading, APassCountsEachSampleOnce) {
  const auto packed = samples(8, false);
  std::vector<std::vector<std::int32_t>> labels;
  SampleRow row;
  for (std::int64_t i = 0; i < 10; ++i) packed->load(i, row), labels.push_back(row.labels);
  for (const int world : {1, 2, 3, 7})
    for (const std::int64_t micro : {1, 2, 4, 16}) {
      std::vector<std::vector<std::int32_t>> seen;
      for (int rank = 0; rank < world; ++rank) {
        TokenLoader loader(packed, {micro, rank, world}, *device_, 10);
        for (int pass = 0; pass < 2; ++pass) {
          for (std::int64_t b = 0; b < loader.batches_per_epoch(); ++b) {
            const auto [batch, counted] = loader.next_of_pass();
            const std::vector<std::int32_t> all = values(batch.at("labels"));
            ASSERT_EQ(std::ssize(all), micro * 8);
            EXPECT_EQ(values(batch.at("target_tokens"))[0], 8 * counted);
            EXPECT_EQ(batch.contains("filling"), counted < micro);
            for (std::int64_t i = 0; i < micro; ++i) {
              const std::vector<std::int32_t> one(all.begin() + 8 * i, all.begin() + 8 * (i + 1));
              if (i >= counted) {
                EXPECT_EQ(one, std::vector<std::int32_t>(8, no_label));
                EXPECT_EQ(values(batch.at("filling"))[static_cast<std::size_t>(i)], 8);
              } else if (pass == 1) {
                seen.push_back(one);
              }
            }
          }
        }
      }
      std::sort(seen.begin(), seen.end());
      auto want = labels;
      std::sort(want.begin(), want.end());
      EXPECT_EQ(seen, want) << world << " ranks of " << micro;
    }
}

TEST_F(TokenLoading, AForLoopRunsToTheEndOfTheEpoch) {
  TokenLoader loader(samples(), {.micro_batch = 4}, *device_);
  for (const std::int64_t epoch : {1, 2}) {
    int batches = 0;
    for (auto& batch : loader) batches += batch.contains("tokens");
    EXPECT_EQ(batches, 21);
    EXPECT_EQ(loader.position(), 84 * epoch);
  }
}

TEST_F(TokenLoading, NamesTheTokenBeyondTheVocabulary) {
  const auto packed = std::make_shared<PackedSamples>(dataset_, SequenceRange{0, 40},
                                                      PackingOptions{.seq_length = 8, .vocab_size = 679});
  TokenLoader loader(packed, {.micro_batch = 1}, *device_);
  expect_error(ErrorKind::data, "counting.bin': token 16 of sequence 39 is 679, beyond the vocabulary of 679",
               [&] {
                 for (auto& batch : loader) EXPECT_EQ(batch.size(), 3u);
               });
}

TEST_F(TokenLoading, RefusesImpossibleRanks) {
  expect_error(ErrorKind::usage, "rank 2 of 2", [&] { TokenLoader(samples(), {1, 2, 2}, *device_); });
  expect_error(ErrorKind::usage, "micro-batch of 0", [&] { TokenLoader(samples(), {0, 0, 1}, *device_); });
}

class SampleLoading : public ::testing::Test {
 protected:
  /// `size` samples: {"x": [i, 10 i], "y": i}.
  std::shared_ptr<const Dataset> numbers(std::int64_t size) const {
    std::vector<std::int32_t> x, y;
    for (std::int64_t i = 0; i < size; ++i) {
      const auto n = static_cast<std::int32_t>(i);
      x.push_back(n), x.push_back(10 * n), y.push_back(n);
    }
    tensor::Batch rows;
    rows["x"] = tensor::Tensor::of<std::int32_t>(*device_, {size, 2}, x);
    rows["y"] = tensor::Tensor::of<std::int32_t>(*device_, {size}, y);
    return make_tensor_dataset(rows);
  }

  /// The samples of each rank in one epoch, batch by batch.
  std::vector<std::vector<std::vector<std::int32_t>>> epoch(std::int64_t size, std::int64_t micro, int world,
                                                            SampleLoaderOptions options) const {
    std::vector<std::vector<std::vector<std::int32_t>>> ranks;
    for (int rank = 0; rank < world; ++rank) {
      SampleLoader loader(numbers(size), {micro, rank, world}, options, *device_);
      auto& batches = ranks.emplace_back();
      for (auto& batch : loader) batches.push_back(values(batch.at("y")));
    }
    return ranks;
  }

  std::shared_ptr<device::Device> device_ = device::make_cpu_device(1);
};

TEST_F(SampleLoading, WhoDoesNotReadMovesOnAlike) {
  const auto none = make_dataset(13, [](std::int64_t) -> tensor::Batch { throw std::runtime_error("read"); });
  for (const bool drop_last : {false, true}) {
    const SampleLoaderOptions options{.shuffle = true, .drop_last = drop_last};
    SampleLoader reads(numbers(13), {2, 0, 2}, options, *device_),
        moves(none, {2, 1, 2, false}, options, *device_);
    reads.seek(1), moves.seek(1);  // so that the end of an epoch is left out
    for (int i = 0; i < 20; ++i) {
      EXPECT_FALSE(reads.next().empty());
      EXPECT_TRUE(moves.next().empty());
      EXPECT_EQ(reads.position(), moves.position());
    }
  }
}

TEST_F(SampleLoading, StacksSamples) {
  SampleLoader loader(numbers(5), {.micro_batch = 2}, {.shuffle = false}, *device_);
  tensor::Batch batch = loader.next();
  EXPECT_EQ(batch.at("x").shape(), (tensor::Shape{2, 2}));
  EXPECT_EQ(values(batch.at("x")), (std::vector<std::int32_t>{0, 0, 1, 10}));
  EXPECT_EQ(batch.at("y").shape(), (tensor::Shape{2}));
  loader.next();
  batch = loader.next();
  EXPECT_EQ(values(batch.at("y")), (std::vector<std::int32_t>{4})) << "the last batch is smaller";
  EXPECT_EQ(values(loader.next().at("y")), (std::vector<std::int32_t>{0, 1}));
}

using Batches = std::vector<std::vector<std::vector<std::int32_t>>>;

TEST_F(SampleLoading, RanksTakeSlices) {
  EXPECT_EQ(epoch(11, 2, 2, {.shuffle = false}),
            (Batches{{{0, 1}, {4, 5}, {8, 9}}, {{2, 3}, {6, 7}, {10, 0}}}));
  EXPECT_EQ(epoch(13, 2, 2, {.shuffle = false}),
            (Batches{{{0, 1}, {4, 5}, {8, 9}, {12}}, {{2, 3}, {6, 7}, {10, 11}, {0}}}));
  EXPECT_EQ(epoch(13, 2, 2, {.shuffle = false, .drop_last = true}),
            (Batches{{{0, 1}, {4, 5}, {8, 9}}, {{2, 3}, {6, 7}, {10, 11}}}));
  EXPECT_EQ(epoch(1, 2, 3, {.shuffle = false}), (Batches{{{0}}, {{0}}, {{0}}}));
}

/// In the same batches, whatever the number of ranks; a rank that is left without a sample has one that does
/// not count.
TEST_F(SampleLoading, APassCountsEachSampleOnce) {
  for (const std::int64_t size : {1, 10, 12, 13})
    for (const std::int64_t micro : {1, 2, 3}) {
      Batches alone;
      for (const int world : {1, 2, 4, 5}) {
        std::vector<std::vector<std::int32_t>> together;
        std::vector<SampleLoader> ranks;
        for (int rank = 0; rank < world; ++rank)
          ranks.emplace_back(numbers(size), LoaderRank{micro, rank, world},
                             SampleLoaderOptions{.shuffle = false}, *device_);
        for (std::int64_t b = 0; b < ranks[0].batches_per_epoch(); ++b)
          for (SampleLoader& loader : ranks) {
            const auto [batch, counted] = loader.next_of_pass();
            EXPECT_EQ(batch.at("y").shape()[0], std::max<std::int64_t>(counted, 1));
            if (counted > 0) together.push_back(values(batch.at("y")));
          }
        EXPECT_EQ(ranks[0].position() % ranks[0].samples_per_epoch(), 0);
        if (world == 1) alone = {together};
        EXPECT_EQ(together, alone[0]) << size << " samples, " << world << " ranks of " << micro;
        std::size_t seen = 0;
        for (const auto& batch : together) seen += batch.size();
        EXPECT_EQ(seen, static_cast<std::size_t>(size));
      }
    }
}

TEST_F(SampleLoading, ShufflesEveryEpochAnew) {
  SampleLoader loader(numbers(12), {.micro_batch = 12}, {.seed = 4}, *device_);
  const auto first = values(loader.next().at("y")), second = values(loader.next().at("y"));
  EXPECT_NE(first, second);
  for (auto order : {first, second}) {
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(order[i], static_cast<std::int32_t>(i));
  }
  loader.seek(0);
  EXPECT_EQ(values(loader.next().at("y")), first);
  SampleLoader resumed(numbers(12), {.micro_batch = 12}, {.seed = 4}, *device_);
  resumed.seek(12);
  EXPECT_EQ(values(resumed.next().at("y")), second);
}

/// As after going on with another number of ranks.
TEST_F(SampleLoading, GoesOnFromAnyPosition) {
  const auto from = [&](std::int64_t position, int world, bool drop_last) {
    std::vector<std::vector<std::int32_t>> out;
    for (int rank = 0; rank < world; ++rank) {
      SampleLoader loader(numbers(14), {2, rank, world}, {.shuffle = false, .drop_last = drop_last},
                          *device_);
      loader.seek(position);
      auto& seen = out.emplace_back();
      for (int i = 0; i < 2; ++i)
        for (const std::int32_t y : values(loader.next().at("y"))) seen.push_back(y);
    }
    return out;
  };
  using Ranks = std::vector<std::vector<std::int32_t>>;
  // An epoch of three ranks has 15 samples, and begins anew after what is left of it.
  EXPECT_EQ(from(8, 3, false), (Ranks{{8, 9, 0}, {10, 11, 1}, {12, 13, 2}}));
  EXPECT_EQ(from(11, 3, false), (Ranks{{11, 12, 0, 1}, {13, 0, 2, 3}, {1, 2, 4, 5}}));
  EXPECT_EQ(from(10, 2, false), (Ranks{{10, 11, 0, 1}, {12, 13, 2, 3}}));
  // With drop_last one of two ranks has 12: what does not fill a batch is left out.
  EXPECT_EQ(from(6, 2, true), (Ranks{{6, 7, 0, 1}, {8, 9, 2, 3}}));
}

TEST_F(SampleLoading, APositionOfOtherRanksIsThePlaceInTheEpoch) {
  SampleLoader loader(numbers(14), {2, 0, 3}, {.shuffle = false}, *device_);  // 15 samples an epoch
  LoaderPosition& position = *loader.shared_position();
  EXPECT_EQ(position.epoch_samples(), 15);
  const auto set = [&](std::int64_t samples, std::int64_t epoch) {
    position.set(samples, epoch);
    return loader.position();
  };
  EXPECT_EQ(set(2 * 14 + 6, 14), 2 * 15 + 6);
  EXPECT_EQ(set(2 * 16 + 15, 16), 3 * 15) << "beyond the end here: the next epoch's beginning";
  EXPECT_EQ(set(47, 15), 47);
  EXPECT_EQ(set(47, 0), 47) << "nothing is known of the epochs there";
  expect_error(ErrorKind::usage, "cannot go to", [&] { set(LoaderPosition::most, 1); });
}

TEST_F(SampleLoading, TakesAFunction) {
  const auto squares = make_dataset(6, [&](std::int64_t i) {
    const std::vector<float> value{static_cast<float>(i * i)};
    return tensor::Batch{{"square", tensor::Tensor::of<float>(*device_, {1}, value)}};
  });
  SampleLoader loader(squares, {.micro_batch = 3}, {.shuffle = false}, *device_);
  loader.next();
  const tensor::Batch batch = loader.next();
  EXPECT_EQ(batch.at("square").shape(), (tensor::Shape{3, 1}));
  EXPECT_EQ(batch.at("square").data<float>()[2], 25.f);
}

TEST_F(SampleLoading, RefusesWhatDoesNotFit) {
  const std::vector<std::int32_t> two{1, 2}, three{1, 2, 3};
  const auto of = [&](const std::vector<std::int32_t>& v) {
    return tensor::Tensor::of<std::int32_t>(*device_, {static_cast<std::int64_t>(v.size())}, v);
  };
  expect_error(ErrorKind::usage, "'y' of the dataset has 3 rows", [&] {
    make_tensor_dataset({{"x", of(two)}, {"y", of(three)}});
  });
  const std::vector<tensor::Batch> shapes{{{"x", of(two)}}, {{"x", of(three)}}};
  expect_error(ErrorKind::usage, "tensor 'x' is int32 [2] in one and int32 [3]",
               [&] { collate(shapes, *device_); });
  const std::vector<tensor::Batch> names{{{"x", of(two)}}, {{"x", of(two)}, {"z", of(two)}}};
  expect_error(ErrorKind::usage, "no tensor 'z'", [&] { collate(names, *device_); });
  expect_error(ErrorKind::usage, "drop_last leaves nothing", [&] {
    SampleLoader(numbers(3), {2, 0, 2}, {.drop_last = true}, *device_);
  });
}

}  // namespace
}  // namespace sherd::data

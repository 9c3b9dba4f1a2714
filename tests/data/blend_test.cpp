#include "data/blend.h"

#include <gtest/gtest.h>

#include <array>

#include "data/packing/packing.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::TempFolder;

std::shared_ptr<const Samples> source(const TempFolder& folder, const std::string& name, std::int32_t first,
                                      std::int64_t seq_length = 4) {
  const std::string prefix = (folder / name).string();
  DatasetBuilder builder(prefix, 60000);
  std::vector<std::int32_t> tokens(401);
  std::iota(tokens.begin(), tokens.end(), first);
  builder.add(tokens);
  builder.finish();
  return std::make_shared<PackedSamples>(IndexedDataset::open(prefix), SequenceRange{0, 1},
                                         PackingOptions{.seq_length = seq_length, .shuffle = false});
}

class Blending : public ::testing::Test {
 protected:
  BlendedSamples blend(const std::vector<double>& weights) const {
    std::vector<std::shared_ptr<const Samples>> sources;
    for (std::size_t i = 0; i < weights.size(); ++i)
      sources.push_back(source(folder_, "s" + std::to_string(i), static_cast<std::int32_t>(1000 * i)));
    return {std::move(sources), weights};
  }
  TempFolder folder_;
};

// numpy: w = weights/sum; for i in range(n): s = argmax(w*max(i, 1.0) - counts); counts[s] += 1, which is
// Megatron Core's build_blending_indices (megatron/core/datasets/helpers.cpp).
TEST_F(Blending, ChoosesAsMegatronDoes) {
  const BlendedSamples three = blend({5, 3, 2});
  const std::array<std::size_t, 24> from{0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1,
                                         2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2, 0};
  const std::array<std::int64_t, 24> which{0, 0, 0, 1, 1, 2, 1, 3, 2,  4, 5, 3,
                                           2, 6, 4, 7, 3, 8, 5, 9, 10, 6, 4, 11};
  for (std::size_t i = 0; i < from.size(); ++i)
    EXPECT_EQ(three.place(static_cast<std::int64_t>(i)), (BlendedSamples::SourcePosition{from[i], which[i]}))
        << i;
  std::array<std::int64_t, 4> counts{};
  const BlendedSamples four = blend({0.7, 0.1, 0.15, 0.05});
  for (std::int64_t i = 0; i < BlendedSamples::cycle; ++i) ++counts[four.place(i).source];
  EXPECT_EQ(counts, (std::array<std::int64_t, 4>{45875, 6554, 9830, 3277}));
}

TEST_F(Blending, TakesEverySampleOfASourceInOrderOverCycles) {
  const BlendedSamples blended = blend({1, 2.5, 0.01});
  std::array<std::int64_t, 3> next{};
  for (std::int64_t i = 0; i < 3 * BlendedSamples::cycle + 17; ++i) {
    const auto place = blended.place(i);
    ASSERT_EQ(place.position, next[place.source]++) << i;
  }
  EXPECT_NEAR(static_cast<double>(next[1]) / static_cast<double>(next[0]), 2.5, 1e-3);
}

TEST_F(Blending, ReadsWhatTheSourceHas) {
  const BlendedSamples blended = blend({1, 1});
  EXPECT_EQ(blended.tokens(), 802);
  EXPECT_EQ(blended.samples_per_round(), 200);
  SampleRow row;
  blended.load(3, row);  // the second of the second source
  EXPECT_EQ(row.tokens, (std::vector<std::int32_t>{1004, 1005, 1006, 1007}));
  EXPECT_EQ(row.labels, (std::vector<std::int32_t>{1005, 1006, 1007, 1008}));
}

/// Samples of which the n-th has n % 5 tokens.
class Uneven final : public Samples {
 public:
  std::int64_t seq_length() const override { return 4; }
  std::int64_t tokens() const override { return 10; }
  std::int64_t tokens_before(std::int64_t position) const override {
    return position / 5 * 10 + (position % 5) * (position % 5 - 1) / 2;
  }
  std::int64_t samples_per_round() const override { return 5; }
  void load(std::int64_t /*position*/, SampleRow& /*row*/) const override {}
  void will_need(std::int64_t /*position*/) const override {}
};

TEST_F(Blending, CountsTheTokensBeforeAPosition) {
  const BlendedSamples blended({source(folder_, "a", 0), std::make_shared<Uneven>()}, {1, 2.5});
  std::int64_t tokens = 0;
  for (std::int64_t p = 0; p < BlendedSamples::cycle + 40; ++p) {
    if (p < 40 || p >= BlendedSamples::cycle) {
      ASSERT_EQ(blended.tokens_before(p), tokens) << p;
    }
    const auto place = blended.place(p);
    tokens += place.source == 0 ? 4 : place.position % 5;
  }
}

TEST_F(Blending, RefusesWhatItCannotMix) {
  expect_error(ErrorKind::config, "data.sources: a weight is", [&] { blend({1, 1e-6}); });
  expect_error(ErrorKind::usage, "sources of 4 and 5 tokens", [&] {
    BlendedSamples({source(folder_, "a", 0), source(folder_, "b", 0, 5)}, {1, 1});
  });
}

}  // namespace
}  // namespace sherd::data

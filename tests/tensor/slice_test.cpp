#include "tensor/slice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "support/expect_error.h"

namespace sherd::tensor {
namespace {

using sherd::testing::expect_error;
using ::testing::ElementsAre;
using Runs = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;

/// Shapes of up to four dimensions, and slices with up to three blocks in each, empty ones and neighbours
/// among them.
class RandomSlices {
 public:
  explicit RandomSlices(unsigned seed) : random_(seed) {}
  std::int64_t number(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  Shape shape() {
    std::vector<std::int64_t> extents(static_cast<std::size_t>(number(0, 4)));
    for (std::int64_t& extent : extents) extent = number(number(0, 9) == 0 ? 0 : 1, 7);
    return Shape(extents);
  }
  Slice slice(const Shape& logical) {
    Slice::Blocks blocks;
    for (const std::int64_t extent : logical.dims()) {
      std::vector<std::int64_t> ends;
      for (int i = 0; i < 6; ++i) ends.push_back(number(0, extent));
      std::sort(ends.begin(), ends.end());
      std::vector<Range> ranges;
      for (std::size_t i = 0; i < 2 * static_cast<std::size_t>(number(0, 3)); i += 2)
        ranges.push_back({ends[i], ends[i + 1]});
      blocks.push_back(number(0, 2) == 0 ? std::vector<Range>{{0, extent}} : ranges);
    }
    return Slice(logical, std::move(blocks));
  }

 private:
  std::mt19937 random_;
};

/// The logical index of each element, by walking over all indices of the whole tensor.
std::vector<std::int64_t> elements_of(const Slice& slice) {
  std::vector<std::int64_t> out;
  for (std::int64_t flat = 0; flat < slice.logical().numel(); ++flat) {
    bool there = true;
    std::int64_t rest = flat;
    for (int axis = slice.logical().rank() - 1; axis >= 0; --axis) {
      const std::int64_t index = rest % slice.logical()[axis];
      rest /= slice.logical()[axis];
      bool in_block = false;
      for (const Range& range : slice.blocks()[static_cast<std::size_t>(axis)])
        in_block = in_block || (range.begin <= index && index < range.end);
      there = there && in_block;
    }
    if (there) out.push_back(flat);
  }
  return out;
}

TEST(Slice, RunsAreThoseOfAWalkOverAllIndices) {
  RandomSlices random(1);
  int sliced = 0;
  for (int round = 0; round < 6000; ++round) {
    const Slice slice = random.slice(random.shape());
    const std::vector<std::int64_t> expected = elements_of(slice);
    ASSERT_EQ(slice.numel(), static_cast<std::int64_t>(expected.size())) << slice.str();
    const std::int64_t begin = random.number(0, slice.numel()), end = random.number(begin, slice.numel());
    std::int64_t at = begin;
    slice.for_each_run(begin, end, [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
      ASSERT_EQ(local, at) << slice.str();
      ASSERT_GT(count, 0) << slice.str();
      for (std::int64_t i = 0; i < count; ++i, ++at)
        ASSERT_EQ(logical + i, expected[static_cast<std::size_t>(at)]) << slice.str() << " at " << at;
    });
    ASSERT_EQ(at, end) << slice.str();
    for (std::int64_t logical = 0; logical <= slice.logical().numel(); ++logical)
      ASSERT_EQ(slice.lower_bound(logical),
                std::lower_bound(expected.begin(), expected.end(), logical) - expected.begin())
          << slice.str() << " at " << logical;
    sliced += !slice.is_whole() && slice.numel() > 0;
  }
  EXPECT_GT(sliced, 800);
}

TEST(Slice, CommonRunsAreTheElementsThatBothHold) {
  RandomSlices random(2);
  int common = 0;
  for (int round = 0; round < 6000; ++round) {
    const Shape logical = random.shape();
    const Slice a = random.slice(logical), b = random.slice(logical);
    const std::int64_t a_begin = random.number(0, a.numel()), a_end = random.number(a_begin, a.numel());
    const std::int64_t b_begin = random.number(0, b.numel()), b_end = random.number(b_begin, b.numel());
    const std::vector<std::int64_t> of_a = elements_of(a), of_b = elements_of(b);
    std::vector<std::pair<std::int64_t, std::int64_t>> expected, got;
    for (std::int64_t i = a_begin; i < a_end; ++i)
      for (std::int64_t j = b_begin; j < b_end; ++j)
        if (of_a[static_cast<std::size_t>(i)] == of_b[static_cast<std::size_t>(j)])
          expected.emplace_back(i, j);
    for_each_common_run(a, a_begin, a_end, b, b_begin, b_end,
                        [&](std::int64_t at, std::int64_t b_at, std::int64_t count) {
                          for (std::int64_t i = 0; i < count; ++i) got.emplace_back(at + i, b_at + i);
                        });
    ASSERT_EQ(got, expected) << a.str() << " and " << b.str();
    common += !expected.empty();
  }
  EXPECT_GT(common, 100);
}

TEST(Slice, HoldsTheBlocksOfARanksHeads) {
  // Rows of Q, K and V of a second of two ranks.
  const Slice slice({12, 3}, {{{2, 4}, {6, 8}, {10, 12}}, {{0, 3}}});
  EXPECT_EQ(slice.shape(), (Shape{6, 3}));
  Runs runs;
  slice.for_each_run(0, 18, [&](auto... run) { runs.emplace_back(run...); });
  EXPECT_THAT(runs, ElementsAre(std::tuple(0, 6, 6), std::tuple(6, 18, 6), std::tuple(12, 30, 6)));
  EXPECT_EQ(slice.str(), "[2:4+6:8+10:12, 0:3] of [12, 3]");
}

TEST(Slice, EqualOnesCompareEqualHoweverTheyAreCut) {
  const Shape shape{8};
  EXPECT_EQ(Slice(shape, {{{0, 3}, {3, 3}, {3, 8}}}), Slice::whole(shape));
  EXPECT_TRUE(Slice(shape, {{{0, 3}, {3, 8}}}).is_whole());
  EXPECT_FALSE(Slice(shape, {{{0, 3}, {4, 8}}}) == Slice::whole(shape));
  EXPECT_TRUE(Slice().is_whole());
  EXPECT_EQ(Slice().numel(), 1);
}

TEST(Slice, RefusesBlocksThatAreNoneOfTheTensor) {
  const Shape shape{4, 5};
  expect_error(ErrorKind::usage, "has blocks of 1 dimensions", [&] { Slice(shape, {{{0, 4}}}); });
  const Slice::Blocks outside{{{0, 4}}, {{0, 6}}}, overlap{{{0, 2}, {1, 4}}, {{0, 5}}},
      back{{{2, 4}, {0, 1}}, {{0, 5}}}, reversed{{{3, 1}}, {{0, 5}}}, negative{{{-1, 1}}, {{0, 5}}};
  for (const Slice::Blocks& blocks : {outside, overlap, back, reversed, negative})
    expect_error(ErrorKind::usage, "blocks of a slice ascend", [&] { Slice(shape, blocks); });
}

}  // namespace
}  // namespace sherd::tensor

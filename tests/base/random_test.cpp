#include "base/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace sherd {
namespace {

using Words = std::array<std::uint32_t, 4>;

/// A counter and key in Random123's order of words.
Words philox_words(Words counter, std::uint32_t k0, std::uint32_t k1) {
  const auto join = [](std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint64_t>(high) << 32 | low;
  };
  return philox({join(k0, k1), join(counter[2], counter[3])}, join(counter[0], counter[1]));
}

// The published known answers of philox4x32-10 (Random123, kat_vectors).
TEST(Philox, gives_the_published_answers) {
  EXPECT_EQ(philox_words({0, 0, 0, 0}, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox_words({ones, ones, ones, ones}, ones, ones),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox_words({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, elements_are_a_function_of_key_and_index_alone) {
  const RandomKey key{1, 2};
  const float late = uniform_at(key, 1u << 20), early = uniform_at(key, 3);
  EXPECT_EQ(uniform_at(key, 3), early);
  EXPECT_EQ(uniform_at(key, 1u << 20), late);
  EXPECT_EQ(uniform_at(key, 5), static_cast<float>(philox(key, 1)[1] >> 8) * 0x1p-24f);
}

TEST(RandomKey, coordinates_make_distinct_streams_that_depend_on_order) {
  const RandomKey root{7, 0};
  std::set<std::uint64_t> streams;
  for (std::uint64_t a = 0; a < 50; ++a)
    for (std::uint64_t b = 0; b < 50; ++b) streams.insert(root.at(a).at(b).stream);
  EXPECT_EQ(streams.size(), 2500u);
  EXPECT_EQ(root.at(1).seed, root.seed);
}

TEST(Uniform, stays_below_one_and_is_even) {
  double sum = 0;
  int low = 0;
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const float u = uniform_at({3, 4}, i);
    ASSERT_TRUE(u >= 0 && u < 1);
    sum += static_cast<double>(u);
    low += u < 0.1f;
  }
  EXPECT_NEAR(sum / 100000, 0.5, 0.005);
  EXPECT_NEAR(low / 100000.0, 0.1, 0.005);
}

TEST(Normal, is_finite_and_has_the_tails_of_a_normal) {
  int beyond_two = 0;
  double products = 0;
  for (std::uint64_t i = 0; i < 200000; ++i) {
    const float z = normal_at({3, 4}, i);
    ASSERT_TRUE(std::isfinite(z));
    beyond_two += std::fabs(z) > 2;
    if (i % 2 == 0) products += static_cast<double>(z) * static_cast<double>(normal_at({3, 4}, i + 1));
  }
  EXPECT_NEAR(beyond_two / 200000.0, 0.0455, 0.002);
  EXPECT_NEAR(products / 100000, 0, 0.015) << "the two of a pair are correlated";
}

TEST(StableHash, is_stable_and_tells_names_apart) {
  EXPECT_EQ(stable_hash("blocks.0.attention.weight"), stable_hash("blocks.0.attention.weight"));
  std::set<std::uint64_t> hashes;
  for (int i = 0; i < 1000; ++i) hashes.insert(stable_hash("blocks." + std::to_string(i)));
  EXPECT_EQ(hashes.size(), 1000u);
  // Initial weights of saved runs depend on it: a change here changes every model.
  EXPECT_EQ(stable_hash("sherd"), 0x8b5bc355e08409a9ull);
}

}  // namespace
}  // namespace sherd

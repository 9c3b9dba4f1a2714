// Buckets of relative positions, against those of transformers' T5Attention._relative_position_bucket.
#include "models/relative_attention.h"

#include <gtest/gtest.h>

namespace sherd::models {
namespace {

/// The distances at which the bucket becomes another, and which.
using Bounds = std::vector<std::pair<std::int64_t, std::int64_t>>;

TEST(RelativePositions, BucketsAreThoseOfTransformers) {
  struct Case {
    bool both_sides;
    std::int64_t buckets, most_distance;
    Bounds bounds;
  };
  const Case cases[] = {
      {true, 32, 128, {{-400, 15}, {-90, 14}, {-63, 13}, {-45, 12}, {-31, 11}, {-22, 10}, {-15, 9}, {-11, 8},
                       {-7, 7},    {-6, 6},   {-5, 5},   {-4, 4},   {-3, 3},   {-2, 2},   {-1, 1},  {0, 0},
                       {1, 17},    {2, 18},   {3, 19},   {4, 20},   {5, 21},   {6, 22},   {7, 23},  {8, 24},
                       {12, 25},   {16, 26},  {23, 27},  {32, 28},  {46, 29},  {64, 30},  {91, 31}}},
      {true, 8, 10, {{-400, 3}, {-4, 2}, {-1, 1}, {0, 0}, {1, 5}, {2, 6}, {5, 7}}},
      {true, 30, 77, {{-400, 14}, {-57, 13}, {-42, 12}, {-31, 11}, {-23, 10}, {-17, 9}, {-12, 8}, {-9, 7},
                      {-6, 6},    {-5, 5},   {-4, 4},   {-3, 3},   {-2, 2},   {-1, 1},  {0, 0},   {1, 16},
                      {2, 17},    {3, 18},   {4, 19},   {5, 20},   {6, 21},   {7, 22},  {10, 23}, {13, 24},
                      {18, 25},   {24, 26},  {32, 27},  {43, 28},  {58, 29}}},
      {false, 32, 128, {{-400, 31}, {-112, 30}, {-98, 29}, {-86, 28}, {-76, 27}, {-66, 26}, {-58, 25},
                        {-51, 24},  {-45, 23},  {-39, 22}, {-34, 21}, {-30, 20}, {-26, 19}, {-23, 18},
                        {-20, 17},  {-18, 16},  {-15, 15}, {-14, 14}, {-13, 13}, {-12, 12}, {-11, 11},
                        {-10, 10},  {-9, 9},    {-8, 8},   {-7, 7},   {-6, 6},   {-5, 5},   {-4, 4},
                        {-3, 3},    {-2, 2},    {-1, 1},   {0, 0}}},
      {false, 8, 10, {{-400, 7}, {-7, 6}, {-6, 5}, {-5, 4}, {-3, 3}, {-2, 2}, {-1, 1}, {0, 0}}}};
  for (const Case& c : cases) {
    auto next = c.bounds.begin();
    std::int64_t want = -1;
    for (std::int64_t distance = -400; distance <= 400; ++distance) {
      if (next != c.bounds.end() && next->first == distance) want = (next++)->second;
      ASSERT_EQ(relative_bucket(distance, c.both_sides, c.buckets, c.most_distance), want)
          << distance << " of " << c.buckets;
    }
    EXPECT_EQ(next, c.bounds.end());
  }
}

TEST(RelativePositions, PublishedModelsHaveTheirParameters) {
  const auto of = [](std::int64_t hidden, std::int64_t layers, std::int64_t heads, std::int64_t ffn,
                     bool gated) {
    GptConfig c = GptConfig::of_family("t5");
    c.vocab_size = 32128, c.hidden_size = hidden, c.num_layers = 2 * layers, c.num_heads = heads,
    c.head_dim = 64;
    c.ffn_hidden_size = ffn, c.seq_length = 626, c.encoder.seq_length = 512, c.tie_embeddings = !gated;
    c.activation = gated ? config::FfnActivation::geglu_tanh : config::FfnActivation::relu;
    return c;
  };
  EXPECT_EQ(of(512, 6, 8, 2048, false).num_parameters(), 60'506'624);       // t5-small
  EXPECT_EQ(of(768, 12, 12, 3072, false).num_parameters(), 222'903'552);    // t5-base
  EXPECT_EQ(of(2048, 24, 32, 5120, true).num_parameters(), 2'849'757'184);  // flan-t5-xl
}

}  // namespace
}  // namespace sherd::models

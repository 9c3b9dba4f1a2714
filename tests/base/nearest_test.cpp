#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <vector>

#include "base/error.h"

namespace sherd {
namespace {

constexpr std::size_t far = std::numeric_limits<std::size_t>::max();

TEST(EditDistance, CountsSlipsWhateverTheCase) {
  EXPECT_EQ(edit_distance("stage", "STAGE"), 0u);
  EXPECT_EQ(edit_distance("overlap_com", "overlap_comm"), 1u);
  EXPECT_EQ(edit_distance("Fial", "Fail"), 1u) << "two letters swapped are one slip";
  EXPECT_EQ(edit_distance("lama", "llama"), 1u);
  EXPECT_EQ(edit_distance("train_batch", "train_batch_size"), 5u);
  EXPECT_EQ(edit_distance("ca", "abc"), far);
  EXPECT_EQ(edit_distance("", ""), 0u);
}

TEST(EditDistance, IsFarBeyondAThirdOfTheLetters) {
  EXPECT_EQ(edit_distance("zero_stage", "dump_state"), far);
  EXPECT_EQ(edit_distance("disk", "nvme"), far);
  EXPECT_EQ(edit_distance("abcdef", "abcdxy"), 2u);
  EXPECT_EQ(edit_distance("abcde", "abcxy"), far);
  EXPECT_EQ(edit_distance("a", "b"), far);
  EXPECT_EQ(edit_distance("a", ""), far);
}

TEST(EditDistance, IsFarWhereOneWordStandsForAnother) {
  EXPECT_EQ(edit_distance("eval_batch_size", "train_batch_size"), far);
  EXPECT_EQ(edit_distance("gradient_accumulation_dtype", "gradient_accumulation_steps"), far);
  EXPECT_EQ(edit_distance("h.11.attn.weight", "h.11.norm.weight"), far);
  EXPECT_EQ(edit_distance("h.11.attn.weight", "h.10.attn.weight"), 1u);
  EXPECT_EQ(edit_distance("cpu_optimization", "cpu_optimizer"), 5u);
  EXPECT_EQ(edit_distance("micro_batch_size", "train_micro_batch_size"), 6u);
}

TEST(Nearest, IsTheOneWithTheFewestSlipsOrNone) {
  const std::vector<std::string> names = {"seed", "speed", "steps"};
  EXPECT_EQ(nearest("stepz", names), "steps");
  EXPECT_EQ(nearest("sped", names), "seed");
  EXPECT_EQ(nearest("lr", names), "");
  EXPECT_EQ(nearest("seed", std::vector<std::string>()), "");
}

TEST(Nearest, TakesNoTimeOverALongWord) {
  const std::string word(10'000'000, 'x'), other(10'000'000, 'y');
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(nearest(word, std::vector<std::string>(100, "train_batch_size")), "");
  EXPECT_EQ(nearest(word, std::vector<std::string>{other}), "");
  EXPECT_EQ(nearest(word, std::vector<std::string>{word}), word);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

}  // namespace
}  // namespace sherd

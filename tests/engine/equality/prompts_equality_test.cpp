// Runs with prompts, beside what holds for all adapters (adapter_equality_test.cpp).
#include <gtest/gtest.h>

#include <cstring>

#include "models/adapters/prompt_weights.h"
#include "support/equality.h"

namespace sherd::test {
namespace {

using Bits = std::vector<std::byte>;

/// One task's prompt out of the table of prompts; four virtual tokens of width 32, in fp32.
Bits prompt(const RunResult& run, std::size_t task, const std::string& parameter = models::prompt_parameter) {
  const Bits& table = run.masters.at(parameter);
  const std::size_t size = 4 * 32 * sizeof(float);
  const auto begin = table.begin() + static_cast<std::ptrdiff_t>(task * size);
  return {begin, begin + static_cast<std::ptrdiff_t>(size)};
}

RunSpec three_tasks(const std::string& optimizer) {
  RunSpec out;
  out.adapter =
      R"("type": "prompt_tuning", "virtual_tokens": 4,
         "tasks": [{"name": "a"}, {"name": "b"}, {"name": "c"}])";
  out.optimizer = optimizer, out.dtype = "fp32", out.steps = 6, out.clipping = 0;
  return out;
}

const char* const adam = R"("type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0})";
const char* const prompts_sgd = R"("type": "SGD", "params": {"lr": 0.01})";

/// Without weight decay a prompt stays to the bit until its task has a sample. Then SGD moves it in steps
/// that have one, and Adam in those without one, too, by what its moments remember.
TEST(PromptsEquality, ATaskWithoutSamplesKeepsItsPrompt) {
  for (const char* optimizer : {adam, prompts_sgd}) {
    RunSpec s = three_tasks(optimizer);
    s.prompt_of = [](int step, std::int64_t) { return step < 3 ? 0 : 1; };
    const auto at = [&](int steps) {
      RunSpec t = s;
      t.steps = steps;
      return train_local(t);
    };
    const auto begun = at(0), middle = at(3), end = at(6);
    EXPECT_NE(prompt(middle, 0), prompt(begun, 0));
    EXPECT_EQ(prompt(middle, 1), prompt(begun, 1));
    EXPECT_NE(prompt(end, 1), prompt(begun, 1));
    EXPECT_EQ(prompt(end, 2), prompt(begun, 2));
    EXPECT_EQ(prompt(end, 0) == prompt(middle, 0), optimizer == prompts_sgd);
  }
}

/// A task's prompt does not depend on the other tasks, where its samples weigh the same.
TEST(PromptsEquality, TasksDoNotDisturbEachOther) {
  RunSpec s = three_tasks(prompts_sgd);
  s.dropout = 0;
  s.prompt_of = [](int, std::int64_t row) { return row % 2; };
  RunSpec t = s;
  t.prompt_of = [](int, std::int64_t row) { return row % 2 == 0 ? 0 : 2; };
  const auto one = train_local(s), other = train_local(t);
  EXPECT_EQ(prompt(one, 0), prompt(other, 0));
  EXPECT_NE(prompt(one, 1), prompt(other, 1));
}

}  // namespace
}  // namespace sherd::test

// The example whose ranks hold stages of a model: it learns, to the same bits however many stages there are.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd {
namespace {

/// Gives what the example prints; its log, which tells of stages, is shown where it fails.
std::string told(const std::string& arguments) {
  const testing::TempFolder folder;
  const std::string out = (folder / "out").string(), log = (folder / "log").string();
  const std::string command = "timeout 120 " SHERD_EXAMPLES "/pipeline " + arguments;
  EXPECT_EQ(std::system((command + " >" + out + " 2>" + log + " </dev/null").c_str()), 0)
      << testing::read_text(log);
  return testing::read_text(out);
}

TEST(PipelineExample, LearnsTheSameOverAnyNumberOfStages) {
  const std::string one = told("1");
  double loss = -1;
  EXPECT_EQ(std::sscanf(one.c_str(), "loss after 400 steps: %lf", &loss), 1) << one;
  EXPECT_GT(loss, 0);
  EXPECT_LT(loss, 0.01);  // the targets' variance is about 0.27
  EXPECT_EQ(told("2 --ranks 2"), one);
  EXPECT_EQ(told("4 --ranks 4"), one);
}

}  // namespace
}  // namespace sherd

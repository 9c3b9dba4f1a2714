// The example whose ranks share layers: it learns, and the same however many share them.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd {
namespace {

double loss_of(const std::string& arguments) {
  const testing::TempFolder folder;
  const std::string out = (folder / "out").string();
  const std::string command = "timeout 120 " SHERD_EXAMPLES "/tensor_parallel_mlp " + arguments;
  EXPECT_EQ(std::system((command + " >" + out + " 2>&1 </dev/null").c_str()), 0) << testing::read_text(out);
  double loss = -1;
  EXPECT_EQ(std::sscanf(testing::read_text(out).c_str(), "loss after 600 steps: %lf", &loss), 1);
  return loss;
}

TEST(TensorParallelMlpExample, LearnsTheSameOnRanksThatShareItsLayers) {
  const double one = loss_of("1");
  EXPECT_GT(one, 0);
  EXPECT_LT(one, 0.005);  // the targets' variance is about 0.27
  EXPECT_NEAR(loss_of("2 --ranks 2"), one, 1e-3 * one);
  EXPECT_NEAR(loss_of("2 --ranks 4"), one, 1e-3 * one);
}

}  // namespace
}  // namespace sherd

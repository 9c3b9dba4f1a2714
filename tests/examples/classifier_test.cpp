// The shipped example, run as a person runs it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd {
namespace {

/// Chance is 1 in 4; the classes overlap, so that nobody is always right.
TEST(ClassifierExample, FindsMostClassesAndSaysSo) {
  const testing::TempFolder folder;
  const std::string out = (folder / "out").string();
  ASSERT_EQ(std::system(("timeout 120 " SHERD_EXAMPLES "/classifier " SHERD_SOURCE_DIR
                         "/configs/classifier.json --ranks 2 >" +
                         out + " 2>&1 </dev/null")
                            .c_str()),
            0)
      << testing::read_text(out);
  const std::string text = testing::read_text(out);
  const std::size_t at = text.rfind("accuracy ");
  ASSERT_NE(at, std::string::npos) << text;
  const double accuracy = std::strtod(text.c_str() + at + 9, nullptr);
  EXPECT_GT(accuracy, 0.8) << text;
  EXPECT_LE(accuracy, 1) << text;
  EXPECT_NE(text.find("samples/s"), std::string::npos) << text;
  EXPECT_NE(text.find("  val_loss 0."), std::string::npos) << text;
  EXPECT_NE(text.find("  accuracy 0."), std::string::npos) << "of an evaluation on the way: " << text;
}

}  // namespace
}  // namespace sherd

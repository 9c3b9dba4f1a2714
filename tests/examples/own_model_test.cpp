// The shipped example, run as a person runs it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd {
namespace {

using testing::read_text;

class OwnModelExample : public ::testing::TestWithParam<const char*> {
 protected:
  /// The losses that it prints, one per epoch.
  std::vector<double> losses(const std::string& section) const {
    std::string config = read_text(SHERD_SOURCE_DIR "/configs/own_model.json");
    config.insert(config.find('{') + 1, section);
    testing::write_text(folder_ / "c.json", config);
    const std::string out = (folder_ / "out").string();
    const std::string command = SHERD_EXAMPLES "/own_model " + (folder_ / "c.json").string() +
                                " --ranks 2 >" + out + " 2>&1 </dev/null";
    EXPECT_EQ(std::system(("timeout 120 " + command).c_str()), 0) << read_text(out);
    std::vector<double> found;
    const std::string text = read_text(out);
    for (std::size_t at = text.find("loss "); at != std::string::npos; at = text.find("loss ", at + 1))
      found.push_back(std::strtod(text.c_str() + at + 5, nullptr));
    return found;
  }
  testing::TempFolder folder_;
};

/// The targets' variance is about 0.27: what a model that knows only their mean would lose.
TEST_P(OwnModelExample, Converges) {
  const std::string precision = GetParam();
  const auto got = losses(precision == "fp32" ? "" : "\"" + precision + "\": {\"enabled\": true},");
  ASSERT_EQ(got.size(), 5u);
  for (const double loss : got) EXPECT_TRUE(std::isfinite(loss));
  EXPECT_LT(got.back(), 0.005);
  EXPECT_LT(got.back(), got.front());
}

INSTANTIATE_TEST_SUITE_P(InEveryPrecision, OwnModelExample, ::testing::Values("fp32", "bf16", "fp16"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace sherd

// The example that saves and resumes, run twice: it goes on where it stopped, and finds w in y = (w·x)².
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd {
namespace {

struct Printed {
  long long step = 0;
  double loss = 0, w[3] = {};
};

Printed run(const std::filesystem::path& folder) {
  const std::string out = (folder / "out").string();
  const std::string command =
      std::string("timeout 120 " SHERD_EXAMPLES "/resume " SHERD_SOURCE_DIR "/configs/own_model.json ") +
      (folder / "run").string() + " --ranks 2 >" + out + " 2>" + out + ".err </dev/null";
  EXPECT_EQ(std::system(command.c_str()), 0) << testing::read_text(out + ".err");
  Printed printed;
  const std::string text = testing::read_text(out);
  EXPECT_EQ(std::sscanf(text.c_str(), "step %lld held-out loss %lf linear.weight = %lf %lf %lf",
                        &printed.step, &printed.loss, &printed.w[0], &printed.w[1], &printed.w[2]),
            5)
      << text;
  return printed;
}

TEST(ResumeExample, GoesOnWhereItStopped) {
  const testing::TempFolder folder;
  const Printed first = run(folder.path()), second = run(folder.path());
  EXPECT_EQ(first.step, 200);
  EXPECT_EQ(second.step, 400);
  EXPECT_LT(second.loss, first.loss / 10);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(second.w[i], 0.1 * (i + 1), 0.01);
}

}  // namespace
}  // namespace sherd

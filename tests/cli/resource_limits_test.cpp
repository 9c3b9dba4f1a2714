// The program where `ulimit` leaves it little: it works, or says what it lacks.
#include <algorithm>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_SANITIZERS() GTEST_SKIP() << "sanitizers need more than any limit leaves"
#else
#define SKIP_UNDER_SANITIZERS()
#endif

class Limited : public Train {
 protected:
  /// The program under `ulimit LIMIT`.
  Outcome limited(const std::string& limit, const std::vector<std::string>& arguments) const {
    return shell(cat("sh -c 'ulimit ", limit, R"( && exec "$@"' sh )", joined(arguments)));
  }
  Outcome with_memory(int mib, const std::vector<std::string>& arguments) const {
    return limited(cat("-v ", mib * 1024), arguments);
  }
  std::vector<std::string> short_run() const {
    // Each thread takes of the limit for its stack, and there are as many as cores otherwise.
    return train({"--ranks", "2", "--steps", "1", "--set", "training.save_dir=", "--set",
                  "device.threads_per_rank=1"});
  }
};

TEST_F(Limited, ASmallStackIsRaisedOrRefused) {
  SKIP_UNDER_SANITIZERS();
  for (const auto& command :
       {std::vector<std::string>{"info"}, {"estimate", "--config", config()}, short_run()}) {
    const Outcome refused = limited("-s 128", command);
    EXPECT_EQ(refused.code, 1) << command[0];
    EXPECT_THAT(refused.err, HasSubstr("sherd: error: the stack is limited to 128 KiB")) << command[0];
    EXPECT_EQ(limited("-S -s 128", command).code, 0) << command[0];
    EXPECT_EQ(limited("-s 512", command).code, 0) << command[0];
  }
}

TEST_F(Limited, TooLittleMemoryIsAnErrorWhereverItIsMissed) {
  SKIP_UNDER_SANITIZERS();
  int least = 16, most = 4096;  // MiB with which the program does not start, and does
  while (most - least > 2) {
    const int between = (least + most) / 2;
    (with_memory(between, {"--version"}).code == 0 ? most : least) = between;
  }
  int refused = 0;
  Outcome outcome{1, "", ""};
  for (int mib = most; outcome.code != 0 && mib < most + 400; mib += 4) {
    outcome = with_memory(mib, short_run());
    ASSERT_TRUE(outcome.code == 0 || outcome.code == 1)
        << outcome.code << " with " << mib << " MiB: " << outcome.err;
    if (outcome.code == 0) break;
    ++refused;
    EXPECT_THAT(outcome.err, HasSubstr("sherd: error: ")) << mib << " MiB";
  }
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_GT(refused, 3);
}

}  // namespace
}  // namespace sherd::cli

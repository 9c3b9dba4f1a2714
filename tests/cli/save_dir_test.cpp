// Two runs with one training.save_dir, and what a killed one leaves there.
#include <signal.h>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

TEST_F(Train, ASecondRunInALiveRunsSaveDirIsRefusedByItsName) {
  const std::string metrics = (folder_ / "first.jsonl").string();
  const pid_t first = start(train({"--ranks", "2", "--steps", "100000", "--metrics", metrics, "--set",
                                   "training.save_interval=2", "--set", "training.keep_last=1"}),
                            "first.err");
  wait_for("first.jsonl", "\"step\":5,");
  const std::string holder =
      cat("'", (folder_ / "run").string(), "' is in use by process ", first, " on host");
  const Outcome local = sherd(train({"--ranks", "2", "--resume"}));
  EXPECT_EQ(local.code, 1);
  EXPECT_EQ(count(local.err, holder), 1u) << local.err;
  const Outcome launched = sherd_launched(2, train({"--resume"}));
  EXPECT_EQ(count(launched.err, "exit code 1\n"), 2u) << launched.err;
  EXPECT_EQ(count(launched.err, holder), 2u) << launched.err;
  kill(first, SIGKILL);
  int status = 0;
  waitpid(first, &status, 0);
  // As a kill while saving leaves it.
  std::filesystem::create_directory(folder_ / "run" / "global_step7.0123456789abcdef.partial");
  const Outcome next = sherd(train({"--ranks", "2", "--resume", "--steps", "1"}));
  EXPECT_EQ(next.code, 0) << next.err;
  EXPECT_THAT(next.err, HasSubstr("global_step7.0123456789abcdef.partial', left by a run that ended"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "global_step7.0123456789abcdef.partial"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / ".sherd.lock"));
}

}  // namespace
}  // namespace sherd::cli

// Offload to NVMe as a person meets it: runs that are killed, run twice, or get a bad folder.
#include <signal.h>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

class OffloadedTrain : public Train {
 protected:
  std::vector<std::string> offloaded(const std::string& name,
                                     const std::vector<std::string>& more = {}) const {
    return offloaded_to((folder_ / "nvme").string(), name, more);
  }
  std::vector<std::string> offloaded_to(const std::string& folder, const std::string& name,
                                        const std::vector<std::string>& more) const {
    std::vector<std::string> out = train({"--ranks", "2", "--metrics", (folder_ / (name + ".jsonl")).string(),
                                          "--set", cat("training.save_dir=", (folder_ / name).string())});
    for (const std::string section : {"offload_param", "offload_optimizer"}) {
      out.insert(out.end(), {"--set", cat("zero_optimization.", section, ".device=nvme"), "--set",
                             cat("zero_optimization.", section, ".nvme_path=", folder)});
    }
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
};

TEST_F(OffloadedTrain, TrainsAsWithoutAndLeavesNothingBehind) {
  const Outcome plain = sherd(train({"--ranks", "2", "--metrics", (folder_ / "plain.jsonl").string()}));
  ASSERT_EQ(plain.code, 0) << plain.err;
  const Outcome got = sherd(offloaded("run_nvme", {"--set", "zero_optimization.offload_param.max_in_cpu=0"}));
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_EQ(metric("run_nvme.jsonl", "loss"), metric("plain.jsonl", "loss"));
  EXPECT_EQ(metric("run_nvme.jsonl", "grad_norm"), metric("plain.jsonl", "grad_norm"));
  EXPECT_THAT(got.out, HasSubstr("nvme optimizer"));
  EXPECT_GT(std::stoll(metric("run_nvme.jsonl", "nvme_peak").back()), 0);
  EXPECT_GT(std::stoll(metric("run_nvme.jsonl", "read_bytes").back()), 0);
  EXPECT_GT(std::stoll(metric("run_nvme.jsonl", "write_bytes").back()), 0);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ / "nvme"))
    EXPECT_FALSE(entry.is_regular_file()) << entry.path();  // neither the states nor the lock
}

TEST_F(OffloadedTrain, KilledInMidStepItGoesOnFromTheCheckpointToTheBit) {
  const auto often = [](std::size_t steps) {
    return std::vector<std::string>{"--set", "training.save_interval=3", "--steps", std::to_string(steps)};
  };
  const pid_t child = start(offloaded("killed", often(100000)), "killed.err");
  wait_for("killed.jsonl", "\"step\":", 8);
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status)) << read_text(folder_ / "killed.err");
  bool stale = false;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ / "nvme"))
    stale = stale || entry.path().extension() == ".swap";
  EXPECT_TRUE(stale);

  const std::size_t steps = metric("killed.jsonl", "loss").size() + 4;  // another save among them
  std::vector<std::string> again = often(steps);
  again.push_back("--resume");
  const Outcome resumed = sherd(offloaded("killed", again));
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("resumed from"));
  const Outcome whole = sherd(offloaded("whole", often(steps)));
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(metric("whole.jsonl", "loss").size(), steps);
  EXPECT_EQ(metric("killed.jsonl", "loss"), metric("whole.jsonl", "loss"));
  EXPECT_EQ(metric("killed.jsonl", "grad_norm"), metric("whole.jsonl", "grad_norm"));
}

TEST_F(OffloadedTrain, TwoRunsOnOneFolderAreRefused) {
  const pid_t child = start(offloaded("first", {"--steps", "100000"}), "first.err");
  wait_for("first.jsonl", "\"step\":");
  const Outcome second = sherd(offloaded("second"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(second.code, 1);
  EXPECT_EQ(count(second.err, "sherd: error:"), 1u) << second.err;
  EXPECT_THAT(second.err, HasSubstr(std::to_string(child))) << "the other process is not named";
}

TEST_F(OffloadedTrain, AFolderThatCannotBeUsedIsOneClearLine) {
  write_text(folder_ / "occupied", "a file");
  const std::string bad = (folder_ / "occupied").string();
  const Outcome got = sherd(offloaded_to(bad, "bad", {}));
  EXPECT_EQ(got.code, 1);
  EXPECT_EQ(count(got.err, "sherd: error:"), 1u) << got.err;
  EXPECT_THAT(got.err, HasSubstr(bad));
}

TEST_F(OffloadedTrain, BuffersTooSmallAreToldAtTheStart) {
  const Outcome got = sherd(offloaded("small", {"--set", "zero_optimization.offload_param.buffer_size=100",
                                                "--set", "zero_optimization.offload_param.max_in_cpu=0"}));
  EXPECT_EQ(got.code, 2);
  EXPECT_EQ(count(got.err, "sherd: error:"), 1u) << got.err;
  EXPECT_THAT(got.err, HasSubstr("buffer_size"));
}

}  // namespace
}  // namespace sherd::cli

// `sherd train` by launchers that only set the environment, as torchrun does: tests/support/launch.sh stands
// for them.
#include <signal.h>

#include <cstring>

#include "cli/train_fixture.h"
#include "support/places.h"

namespace sherd::cli {
namespace {

using ::testing::AllOf;

class Launched : public Train {
 protected:
  /// Waits for the launch to end; its exit code.
  static int end_of(pid_t launch) {
    int status = 0;
    waitpid(launch, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  pid_t process_of(int rank) const { return noted_process(cat("pid", rank)); }
  /// Has each rank's shell write its id down and become the program.
  std::string noted(int ranks, const std::vector<std::string>& arguments) const {
    return cat(SHERD_SOURCE_DIR "/tests/support/launch.sh ", ranks, " sh -c 'echo $$ >",
               folder_.path().string(), R"(/pid$RANK; exec "$@"' sh )", joined(arguments));
  }
  /// Contents of the checkpoint's files behind their headers, which name the act of saving.
  std::vector<std::string> weights(int ranks, const std::string& tag) const {
    std::vector<std::string> out;
    for (int r = 0; r < ranks; ++r) {
      const std::string file = read_text(folder_ / "run" / tag / cat("rank_0000", r, ".safetensors"));
      std::uint64_t header = 0;
      std::memcpy(&header, file.data(), sizeof header);
      out.push_back(file.substr(sizeof header + header));
    }
    return out;
  }
};

TEST_F(Launched, GivesTheBitsOfLocalRanks) {
  for (const int ranks : {2, 4}) {
    const std::string count = std::to_string(ranks);
    const auto run = [&](const char* metrics) {
      return train({"--metrics", (folder_ / metrics).string(), "--set", "device.threads_per_rank=1"});
    };
    auto local_run = run("local.jsonl");
    local_run.insert(local_run.end(), {"--ranks", count});
    const Outcome local = sherd(local_run);
    ASSERT_EQ(local.code, 0) << local.err;
    const auto expected = weights(ranks, "global_step6");
    std::filesystem::remove_all(folder_ / "run");
    const Outcome got = sherd_launched(ranks, run("tcp.jsonl"));
    ASSERT_EQ(got.code, 0) << got.err;
    EXPECT_THAT(got.err, HasSubstr(cat("over tcp(", ranks, ")")));
    EXPECT_EQ(metric("tcp.jsonl", "loss"), metric("local.jsonl", "loss"));
    EXPECT_EQ(metric("tcp.jsonl", "grad_norm"), metric("local.jsonl", "grad_norm"));
    EXPECT_EQ(metric("tcp.jsonl", "loss").size(), 6u);
    EXPECT_TRUE(weights(ranks, "global_step6") == expected) << "on " << ranks << " ranks";
    std::filesystem::remove_all(folder_ / "run");
  }
}

/// Tasks of a step of Slurm's, with its variables alone.
TEST_F(Launched, TasksOfSrunNeedNobodyElse) {
  const auto run = [&](const char* metrics) {
    return train({"--metrics", (folder_ / metrics).string(), "--set", "device.threads_per_rank=1"});
  };
  auto local_run = run("local.jsonl");
  local_run.insert(local_run.end(), {"--ranks", "2"});
  ASSERT_EQ(sherd(local_run).code, 0);
  std::filesystem::remove_all(folder_ / "run");
  const Outcome got = sherd_launched(
      2, run("slurm.jsonl"),
      "export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$RANK SLURM_LOCALID=$RANK "
      "SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST='localhost,node[1-2]' "
      "SLURM_STEP_RESV_PORTS=$MASTER_PORT; "
      "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT");
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, HasSubstr("over tcp(2)"));
  EXPECT_EQ(metric("slurm.jsonl", "loss"), metric("local.jsonl", "loss"));
  EXPECT_EQ(metric("slurm.jsonl", "loss").size(), 6u);
}

TEST_F(Launched, ResumesToTheSameLosses) {
  const auto run = [&](const char* metrics, std::vector<std::string> more) {
    more.insert(more.end(), {"--metrics", (folder_ / metrics).string()});
    return sherd_launched(2, train(more));
  };
  ASSERT_EQ(run("whole.jsonl", {}).code, 0);
  std::filesystem::remove_all(folder_ / "run");
  ASSERT_EQ(run("parts.jsonl", {"--steps", "3"}).code, 0);
  const Outcome rest = run("parts.jsonl", {"--resume"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_THAT(rest.err, HasSubstr("resumed from"));
  EXPECT_EQ(metric("parts.jsonl", "loss"), metric("whole.jsonl", "loss"));
  EXPECT_EQ(metric("parts.jsonl", "loss").size(), 6u);
}

/// One command for every start: begins, goes on, and ranks that do not see the same checkpoint do not train.
TEST_F(Launched, ResumesOrStarts) {
  const auto run = [&](const char* metrics, std::vector<std::string> more, const std::string& wrapper = "") {
    more.insert(more.end(), {"--metrics", (folder_ / metrics).string(), "--resume-or-start"});
    return wrapper.empty() ? sherd_launched(2, train(more)) : sherd_launched(2, train(more), wrapper);
  };
  ASSERT_EQ(run("whole.jsonl", {}).code, 0);
  std::filesystem::remove_all(folder_ / "run");
  const Outcome first = run("parts.jsonl", {"--steps", "3"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(count(first.err, "resumed from"), 0u);
  const Outcome split = run("split.jsonl", {},
                            R"(if [ $RANK = 1 ]; then set -- "$@" --set training.save_dir=)" +
                                (folder_ / "elsewhere").string() + "; fi");
  EXPECT_NE(split.code, 0);
  EXPECT_THAT(split.err, HasSubstr("checkpoint that --resume-or-start finds"));
  const Outcome rest = run("parts.jsonl", {});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_THAT(rest.err, HasSubstr("resumed from"));
  EXPECT_EQ(metric("parts.jsonl", "loss"), metric("whole.jsonl", "loss"));
  // Checkpoints without the file that names the newest are nobody's to begin among, nor to delete.
  std::filesystem::remove(folder_ / "run/latest");
  for (const char* how : {"--resume-or-start", "--steps"}) {
    std::vector<std::string> again{"--set", "training.keep_last=1", how};
    if (how == std::string("--steps")) again.emplace_back("7");
    const Outcome among = sherd(train(again));
    EXPECT_EQ(among.code, 2) << how;
    EXPECT_THAT(among.err, HasSubstr("and no file `latest` that names the newest"));
    EXPECT_TRUE(std::filesystem::exists(folder_ / "run/global_step6/manifest.json"));
  }
  EXPECT_EQ(sherd(train({"--resume-or-start", "--tag", "global_step6", "--steps", "7"})).code, 0);
  EXPECT_EQ(sherd(train({"--resume", "--resume-or-start"})).code, 2);
  const Outcome nowhere = sherd(train({"--resume-or-start", "--set", "training.save_dir=\"\""}));
  EXPECT_EQ(nowhere.code, 2);
  EXPECT_THAT(nowhere.err, HasSubstr("--resume-or-start looks into training.save_dir, which is not set"));
}

TEST_F(Launched, ARankThatFailsEndsAllWithItsReason) {
  const Outcome got =
      sherd_launched(3, train({"--set", "train_batch_size=6"}),
                     R"(if [ $RANK = 1 ]; then set -- "$@" --set data.path=/nonexistent/data; fi)");
  EXPECT_NE(got.code, 0);
  EXPECT_EQ(count(got.err, "exit code 1\n"), 1u) << got.err;
  EXPECT_EQ(count(got.err, "exit code 4\n"), 2u) << "others say that it was another\n" << got.err;
  EXPECT_EQ(count(got.err, "error: "), 3u) << "one line from each rank\n" << got.err;
  EXPECT_EQ(count(got.err, "/nonexistent/data"), 3u) << got.err;
  EXPECT_THAT(got.err, HasSubstr("rank 1 failed"));
}

/// An error that a rank sees before it meets the others is told to them, too, who would wait for it until the
/// deadline.
TEST_F(Launched, ARankThatFailsEarlyEndsAllWithItsReason) {
  const struct {
    const char *more, *reason;
    std::size_t own;  // exit code of rank 1
  } cases[] = {{"--config /nonexistent/c.json", "/nonexistent/c.json", 1},
               {"--metrics /dev/null --plot /nonexistent/p.svg", "--plot: the folder", 2}};
  for (const auto& [more, reason, own] : cases) {
    const Outcome got = sherd_launched(3, train({"--set", "train_batch_size=6"}),
                                       cat("if [ $RANK = 1 ]; then set -- \"$@\" ", more, "; fi"));
    EXPECT_EQ(count(got.err, cat("exit code ", own, "\n")), 1u) << got.err;
    EXPECT_EQ(count(got.err, "exit code 4\n"), 2u) << got.err;
    EXPECT_EQ(count(got.err, reason), 3u) << got.err;
    EXPECT_EQ(count(got.err, "rank 1 failed"), 2u) << got.err;
  }
}

TEST_F(Launched, RanksOfDifferentConfigurationsAreRefused) {
  const auto run = [&](const std::string& more) {
    return sherd_launched(2, train({"--set", "training.save_dir="}),
                          cat("if [ $RANK = 1 ]; then set -- \"$@\" --set ", more, "; fi"));
  };
  for (const char* key : {"optimizer.params.lr", "training.steps", "parallel.tensor"}) {
    const Outcome got = run(cat(key, key[0] == 'p' ? "=2" : "=5"));
    EXPECT_EQ(got.code, 2);
    EXPECT_EQ(count(got.err, cat("rank 1 was started with another ", key)), 2u) << got.err;
  }
  const Outcome got = run("device.threads_per_rank=1");  // machines may differ
  EXPECT_EQ(got.code, 0) << got.err;
}

TEST_F(Launched, AKilledRankIsNamedByTheOthers) {
  const pid_t launch =
      start_line(noted(3, train({"--set", "train_batch_size=6", "--steps", "100000"})), "kill.err");
  wait_for("kill.err", "training tokens");
  kill(process_of(1), SIGKILL);
  EXPECT_EQ(end_of(launch), 128 + SIGKILL);
  const std::string said = read_text(folder_ / "kill.err");
  EXPECT_EQ(count(said, "error: "), 2u) << said;
  EXPECT_EQ(count(said, "rank 1 is dead"), 2u) << said;
}

TEST_F(Launched, ALateRankIsNamedAtTheDeadline) {
  const pid_t launch =
      start_line(noted(2, train({"--steps", "100000", "--set", "parallel.timeout_seconds=8"})), "late.err");
  wait_for("late.err", "training tokens");
  kill(process_of(1), SIGSTOP);
  wait_for("late.err", "error: ");
  kill(process_of(1), SIGCONT);
  EXPECT_EQ(end_of(launch), 4);
  const std::string said = read_text(folder_ / "late.err");
  EXPECT_EQ(count(said, "error: "), 2u) << said;
  EXPECT_THAT(said, HasSubstr("rank 1 did not come within 8 s"));
}

TEST_F(Launched, ASignalSavesAndTheRunGoesOn) {
  const std::string metrics = (folder_ / "term.jsonl").string();
  const pid_t launch = start_line(noted(2, train({"--steps", "100000", "--metrics", metrics})), "term.err");
  wait_for("term.jsonl", "\"step\":");                            // all ranks listen to signals then
  for (const int rank : {0, 1}) kill(process_of(rank), SIGTERM);  // as torchrun does
  EXPECT_EQ(end_of(launch), 143);
  EXPECT_THAT(read_text(folder_ / "term.err"), HasSubstr("go on with --resume"));
  const std::string tag = read_text(folder_ / "run" / "latest");
  const auto step = std::stoll(tag.substr(tag.find_first_of("0123456789")));
  const Outcome more = sherd_launched(2, train({"--resume", "--steps", std::to_string(step + 1)}));
  EXPECT_EQ(more.code, 0) << more.err;
}

TEST_F(Launched, ContradictionsAreRefusedAtOnce) {
  const Outcome other = sherd_launched(2, train({"--ranks", "4"}));
  EXPECT_EQ(count(other.err, "exit code 2\n"), 2u) << other.err;
  EXPECT_THAT(other.err,
              AllOf(HasSubstr("4 ranks were asked for"), HasSubstr("started 2"), HasSubstr("WORLD_SIZE")));
  const Outcome same = sherd_launched(2, train({"--ranks", "2", "--steps", "1"}));
  EXPECT_EQ(same.code, 0) << same.err;
  const Outcome partial = shell(cat("env -u MASTER_ADDR RANK=0 WORLD_SIZE=2 ", joined(train())));
  EXPECT_EQ(partial.code, 2);
  EXPECT_THAT(partial.err, HasSubstr("MASTER_ADDR is not set"));
}

}  // namespace
}  // namespace sherd::cli

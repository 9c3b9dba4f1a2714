// How runs end: by signals, by errors, and with nobody to read what they say. The real program.
#include <signal.h>

#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using ::testing::AllOf;
using ::testing::Not;

class RunEnds : public Train {
 protected:
  RunEnds() { ::setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 0); }
  std::string path(const char* name) const { return (folder_ / name).string(); }
  bool exists(const char* name) const { return std::filesystem::exists(folder_ / name); }

  /// Runs the program inside shell code that calls it by "$@" and that writes its exit code to the file
  /// `code`.
  Outcome inside(const std::string& code, const std::vector<std::string>& arguments) const {
    Outcome out = shell(cat("sh -c '", code, "' sh ", joined(arguments)));
    if (exists("code")) out.code = std::stoi(read_text(folder_ / "code"));
    return out;
  }
  std::string told() const { return cat("echo $? >", path("code")); }

  /// Starts a run that goes on until it is stopped, waits for its first step, and sends each process
  /// `signal`. The exit code of the launch; what it printed is in said_ and printed_.
  int stop(const std::string& launcher, std::vector<std::string> more, int processes, int signal) {
    std::filesystem::remove(folder_ / "m.jsonl");
    more.insert(more.end(), {"--steps", "10000000", "--set", "training.log_interval=1000000", "--metrics",
                             path("m.jsonl"), "--plot", path("loss.svg")});
    const std::string named = cat(launcher, " sh -c 'echo $$ >", path("pid"),
                                  R"(${RANK:-$OMPI_COMM_WORLD_RANK}; exec "$@"' sh )", joined(train(more)));
    const pid_t launch = start_line(named, "stop.err");
    wait_for("m.jsonl", "\"step\":");  // all ranks listen to signals then
    for (int r = 0; r < processes; ++r) kill(noted_process(processes > 1 ? cat("pid", r) : "pid"), signal);
    int status = 0;
    waitpid(launch, &status, 0);
    said_ = read_text(folder_ / "stop.err"), printed_ = read_text(folder_ / "background.out");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  void expect_whole_end(const std::string& signal) const {
    EXPECT_EQ(count(said_, cat("sherd: ", said_.find("[rank 0]") == std::string::npos ? "" : "[rank 0] ",
                               "stopped by ", signal, " after step ")),
              1u)
        << said_;
    EXPECT_THAT(said_, AllOf(HasSubstr("go on with --resume (checkpoint in "), Not(HasSubstr("error"))));
    EXPECT_THAT(printed_,
                AllOf(HasSubstr("parameters"), HasSubstr("median step"), HasSubstr("unigram entropy")));
    EXPECT_THAT(read_text(folder_ / "loss.svg"), HasSubstr("<svg"));
    EXPECT_TRUE(exists("run/latest"));
  }

  std::string said_, printed_;
};

TEST_F(RunEnds, ASignalToLocalRanksSavesReportsAndGivesItsCode) {
  EXPECT_EQ(stop("env", {"--ranks", "2"}, 1, SIGHUP), 129);
  expect_whole_end("SIGHUP");
  std::filesystem::remove_all(folder_ / "run");
  EXPECT_EQ(stop("env", {}, 1, SIGINT), 130);
  expect_whole_end("SIGINT");
}

TEST_F(RunEnds, ASignalToLaunchedRanksSavesReportsAndGivesItsCode) {
  EXPECT_EQ(stop(SHERD_SOURCE_DIR "/tests/support/launch.sh 2", {}, 2, SIGTERM), 143);
  expect_whole_end("SIGTERM");
}

TEST_F(RunEnds, ASignalToMpiRanksSavesReportsAndGivesItsCode) {
  if (!SHERD_TEST_MPI) GTEST_SKIP() << "this build has no MPI";
  EXPECT_EQ(stop(sherd::testing::mpirun(2), {}, 2, SIGTERM), 143);
  expect_whole_end("SIGTERM");
}

TEST_F(RunEnds, WithoutANewStepThereIsNothingToDraw) {
  ASSERT_EQ(sherd(train()).code, 0);
  const Outcome again = sherd(train({"--resume", "--metrics", path("m.jsonl"), "--plot", path("loss.svg")}));
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.err, HasSubstr("there is no loss to draw yet"));
  EXPECT_FALSE(exists("loss.svg"));
}

/// Whoever trains from the command line calls no functions.
TEST_F(RunEnds, AnErrorNamesTheCheckpointToGoOnFrom) {
  ASSERT_EQ(sherd(train({"--steps", "2"})).code, 0);
  for (const char* lr : {"1e38", "1e300"}) {
    const Outcome got = sherd(train({"--resume", "--set", cat("optimizer.params.lr=", lr)}));
    EXPECT_EQ(got.code, 1);
    EXPECT_EQ(count(got.err, "error: "), 1u) << got.err;
    EXPECT_THAT(got.err, HasSubstr(cat("; go on with --resume (checkpoint of step 2 in ", path("run"),
                                       ", or an earlier one with --tag)")));
    EXPECT_THAT(got.err, Not(HasSubstr("()")));
  }
}

TEST_F(RunEnds, AReaderThatGoesEndsNoTraining) {
  const Outcome got = inside(cat(R"({ "$@" 2>&1; )", told(), "; } | true"), train({"--ranks", "2"}));
  EXPECT_EQ(got.code, 0);
  EXPECT_EQ(read_text(folder_ / "run" / "latest"), "global_step6\n");
}

/// The next file to be opened would get the number of a standard stream, and with it what is printed.
TEST_F(RunEnds, ClosedStreamsHarmNoFile) {
  const Outcome got = inside(R"("$@" >&- 2>&-)", train({"--metrics", path("m.jsonl")}));
  EXPECT_EQ(got.code, 0);
  std::ifstream lines(folder_ / "m.jsonl");
  int steps = 0;
  for (std::string line; std::getline(lines, line); ++steps)
    EXPECT_EQ(nlohmann::json::parse(line, nullptr, false).value("step", 0), steps + 1) << line;
  EXPECT_EQ(steps, 6);
  EXPECT_EQ(sherd(train({"--resume", "--steps", "7"})).code, 0);
}

TEST_F(RunEnds, OtherCommandsStopQuietlyWithTheirReader) {
  ASSERT_EQ(sherd(train()).code, 0);
  const std::vector<std::string> endless{"generate", "--checkpoint", path("run"), "--prompt",
                                         "The",      "--max-tokens", "100000000"};
  for (const auto& arguments : {endless, {"info"}, {"--help"}}) {
    const Outcome got = inside(cat(R"({ "$@"; )", told(), "; } | true"), arguments);
    EXPECT_EQ(got.code, 0) << arguments[0];
    EXPECT_EQ(got.err, "") << arguments[0];
  }
}

TEST_F(RunEnds, OutputThatCannotBeWrittenIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  const std::vector<std::vector<std::string>> commands{
      train({"--steps", "2", "--ranks", "2"}),
      {"generate", "--checkpoint", path("run"), "--prompt", "The", "--max-tokens", "4"},
      {"estimate", "--config", config(), "--gpus", "2"},
      {"prepare", "--input", path("text.txt"), "--output", path("again")},
      {"bench", "adam", "--parameters", "64k", "--rounds", "1"},
      {"plot", "--help"},
      {"info"},
      {"--help"}};
  for (const auto& arguments : commands) {
    const Outcome got = inside(R"("$@" >/dev/full)", arguments);
    EXPECT_EQ(got.code, 1) << arguments[0];
    EXPECT_EQ(count(got.err, "sherd: error: cannot write to standard output: No space left on device\n"), 1u)
        << arguments[0] << ": " << got.err;
  }
  EXPECT_EQ(read_text(folder_ / "run" / "latest"), "global_step2\n") << "training itself is saved";
}

TEST_F(RunEnds, ALimitOfFileSizesIsAnErrorThatNamesTheFile) {
  ASSERT_EQ(sherd(train({"--steps", "2"})).code, 0);
  const auto rank_file = folder_ / "run" / "global_step2" / "rank_00000.safetensors";
  const std::string before = read_text(rank_file);
  const Outcome saving = inside(R"(ulimit -f 100; "$@")", train({"--resume"}));
  EXPECT_EQ(saving.code, 1);
  EXPECT_EQ(count(saving.err, "error: "), 1u) << saving.err;
  EXPECT_THAT(saving.err, AllOf(HasSubstr("rank_00000.safetensors"), HasSubstr("File too large"),
                                HasSubstr("go on with --resume (checkpoint of step 2")));
  EXPECT_EQ(read_text(folder_ / "run" / "latest"), "global_step2\n");
  EXPECT_TRUE(read_text(rank_file) == before);
  const Outcome metrics =
      inside(R"(ulimit -f 8; "$@")", train({"--resume", "--steps", "60", "--metrics", path("m.jsonl"),
                                            "--set", "training.log_interval=1000"}));
  EXPECT_EQ(metrics.code, 1);
  EXPECT_THAT(metrics.err,
              HasSubstr(cat("cannot write to the metrics file '", path("m.jsonl"), "': File too large")));
  const Outcome resumed = sherd(train({"--resume"}));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
}

/// A machine without a GPU has nothing to say of one, and one of a thing has no plural.
TEST_F(RunEnds, ASmallRunIsAnnouncedAsWhatItIs) {
  const Outcome got = sherd(train({"--set", "device.threads_per_rank=1", "--set", "model.num_layers=1"}));
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err,
              AllOf(HasSubstr("(1 layer, "), HasSubstr("1 thread per rank"),
                    HasSubstr("x 1 data-parallel rank, 16 tokens each"), Not(HasSubstr("no NVIDIA driver"))));
}

}  // namespace
}  // namespace sherd::cli

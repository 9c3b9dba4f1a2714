// `sherd train` stopped at any moment while other signals come: each time it ends with the signal's code, and
// what it promises to save is whole and of the last step. SHERD_STOP_ROUNDS sets how often (4 where it is not
// set, as in CI: by each signal once), SHERD_STOP_SEED when.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include <random>

#include "base/files.h"
#include "base/threads.h"
#include "cli/train_fixture.h"
#include "engine/checkpoint/checkpoint.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

unsigned from_environment(const char* name, unsigned otherwise) {
  const char* asked = std::getenv(name);
  return asked ? static_cast<unsigned>(std::atoi(asked)) : otherwise;
}

class Stop : public Train {
 protected:
  /// Large enough that signals mostly come while products are made.
  std::string line(unsigned ranks) const {
    std::vector<std::string> arguments = train({"--ranks", std::to_string(ranks), "--steps", "1000000",
                                                "--metrics", (folder_ / "m.jsonl").string()});
    for (const char* set :
         {"model.seq_length=128", "model.hidden_size=320", "model.num_heads=5", "model.dropout=0",
          "bf16.enabled=false", "device.threads_per_rank=2", "training.save_interval=5",
          "training.keep_last=1", "training.log_interval=1000000"})
      arguments.insert(arguments.end(), {"--set", set});
    return joined(arguments);
  }
  /// A thousand times a second a signal that the program takes and does nothing about, and after a while the
  /// one that stops it. The exit code; -1 where a signal ended it, or nothing did.
  int stop(unsigned ranks, int signal, unsigned milliseconds) const {
    for (const char* left : {"run", "m.jsonl"}) fs::remove_all(folder_ / left);
    const pid_t child = start_line(line(ranks), "stop.err");
    wait_for("m.jsonl", "\"step\":");
    int status = 0;
    for (unsigned passed = 0; waitpid(child, &status, WNOHANG) == 0; ++passed) {
      kill(child, passed == milliseconds ? signal : passed < 60'000 ? SIGPIPE : SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
};

TEST_F(Stop, AtAnyMomentSavesTheLastStepWhole) {
  std::mt19937 random(from_environment("SHERD_STOP_SEED", 1));
  const unsigned rounds = from_environment("SHERD_STOP_ROUNDS", 4);
  for (unsigned round = 0; round < rounds && !HasFailure(); ++round) {
    const int signal = stop_signals[round % stop_signals.size()];
    const unsigned ranks = 1 + random() % 2;
    const int code = stop(ranks, signal, random() % 200);
    SCOPED_TRACE(
        cat("round ", round, ", signal ", signal, ", ", ranks, " ranks\n", read_text(folder_ / "stop.err")));
    ASSERT_EQ(code, 128 + signal);
    EXPECT_EQ(read_text(folder_ / "run" / "latest"),
              cat("global_step", metric("m.jsonl", "step").back(), "\n"));
    for (const auto& entry : fs::directory_iterator(folder_ / "run"))
      EXPECT_NE(entry.path().extension(), ".partial");
    engine::CheckpointReader(engine::checkpoint_folder(folder_ / "run")).verify_all();
  }
}

/// A program that waits for its configuration, which comes by a pipe.
class Inquiry : public Train {
 protected:
  Inquiry() { EXPECT_EQ(::mkfifo(pipe().c_str(), 0600), 0); }
  std::string pipe() const { return (folder_ / "pipe").string(); }
  std::string command() const {
    return joined(
        train({pipe(), "--ranks", "2", "--steps", "8", "--metrics", (folder_ / "m.jsonl").string()}));
  }
  /// Once the program waits at the other end. It finds a file there when it looks again.
  FileDescriptor opened() const {
    FileDescriptor end;
    for (int turn = 0; turn < 1500 && !end; ++turn) {
      end = FileDescriptor(::open(pipe().c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
      if (!end) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    write_text(folder_ / "file", "{}");
    fs::rename(folder_ / "file", pipe());
    return end;
  }
  /// Whether a program treats SIGUSR2 so: "SigIgn", "SigCgt".
  static bool has(pid_t process, const std::string& what) {
    std::ifstream in(cat("/proc/", process, "/status"));
    for (std::string line; std::getline(in, line);)
      if (line.starts_with(what + ":"))
        return std::stoull(line.substr(what.size() + 1), nullptr, 16) >> (SIGUSR2 - 1) & 1;
    return false;
  }
};

TEST_F(Inquiry, EndsNothingAtAnyMoment) {
  const pid_t child = start_line(command(), "train.err");
  FileDescriptor end = opened();
  ASSERT_TRUE(end);
  EXPECT_TRUE(has(child, "SigCgt"));
  int status = 0;
  for (int turn = 0; turn < 3; ++turn) {
    kill(child, SIGUSR2);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_EQ(waitpid(child, &status, WNOHANG), 0) << "it ended before it had read its configuration";
  ASSERT_EQ(::write(end.get(), "{}", 2), 2);
  end = FileDescriptor();
  for (int turn = 0; waitpid(child, &status, WNOHANG) == 0; ++turn) {
    if (turn < 300 || turn % 50 == 0) kill(child, turn < 50'000 ? SIGUSR2 : SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << read_text(folder_ / "train.err");
  EXPECT_EQ(metric("m.jsonl", "step").size(), 8u);
}

TEST_F(Inquiry, ThatIsIgnoredStaysIgnored) {
  const pid_t child = start_line("sh -c 'trap \"\" USR2; exec \"$@\"' sh " + command(), "train.err");
  FileDescriptor end = opened();
  ASSERT_TRUE(end);
  EXPECT_TRUE(has(child, "SigIgn"));
  EXPECT_FALSE(has(child, "SigCgt"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace sherd::cli

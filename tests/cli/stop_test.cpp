// `sherd train` stopped at any moment while other signals come: each time it ends with the signal's code, and
// what it promises to save is whole and of the last step. SHERD_STOP_ROUNDS sets how often (4 where it is not
// set, as in CI: by each signal once), SHERD_STOP_SEED when.
#include <signal.h>

#include <random>

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

}  // namespace
}  // namespace sherd::cli

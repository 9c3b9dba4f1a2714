// `sherd train` killed at any moment, half of the times while it saves: whatever is left, the newest
// checkpoint is whole and the run goes on from it to the same bits. SHERD_KILL_ROUNDS sets how often (8 where
// it is not set, as in CI), SHERD_KILL_SEED when. An adapter is trained, so that each checkpoint has files of
// its own and links to those of the one before.
#include <signal.h>

#include <map>
#include <random>
#include <set>

#include "cli/train_fixture.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/report/step_record.h"
#include "tensor/safetensors/safetensors.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

int signed_from_environment(const char* name, int otherwise) {
  const char* asked = std::getenv(name);
  return asked ? std::atoi(asked) : otherwise;
}

class Kill : public Train {
 protected:
  static constexpr int steps = 120;
  using Losses = std::map<std::string, std::string>;  ///< by step, as text

  std::vector<std::string> run_of(const std::string& metrics) const {
    return train({"--steps", std::to_string(steps), "--metrics", (folder_ / metrics).string(), "--set",
                  "training.save_interval=2", "--set", "training.keep_last=2", "--set",
                  R"(training.adapter={"type": "lora", "rank": 2, "targets": "all-linear"})", "--set",
                  "device.threads_per_rank=1"});
  }
  /// Two ranks: threads of one process, or processes of which a launcher tells nothing but their places.
  std::string line(bool launched_ranks, bool on_nvme) const {
    std::vector<std::string> arguments = run_of("m.jsonl");
    for (const std::string& option : resuming()) arguments.push_back(option);
    if (on_nvme)
      arguments.insert(arguments.end(),
                       {"--set", "zero_optimization.offload_optimizer.device=nvme", "--set",
                        cat("zero_optimization.offload_optimizer.nvme_path=", folder_.path().string())});
    // Each writes its id down and becomes the program.
    const std::string note = cat("echo $$ >", folder_.path().string(), R"(/pid$RANK; exec "$@")");
    if (launched_ranks)
      return cat(SHERD_SOURCE_DIR "/tests/support/launch.sh 2 sh -c '", note, "' sh ", joined(arguments));
    arguments.insert(arguments.end(), {"--ranks", "2"});
    return cat("env RANK=0 sh -c '", note, "' sh env -u RANK ", joined(arguments));
  }
  Losses losses(const std::string& metrics) const {
    Losses out;
    const auto numbers = metric(metrics, "step"), values = metric(metrics, "loss");
    for (std::size_t i = 0; i < std::min(numbers.size(), values.size()); ++i) out[numbers[i]] = values[i];
    return out;
  }
  /// 0 before it has begun and after it has ended: its id may be another's by then.
  pid_t process_of(int rank) const {
    const fs::path file = folder_ / cat("pid", rank);
    const std::string text = fs::exists(file) ? read_text(file) : "";
    if (!text.ends_with('\n')) return 0;
    const pid_t process = std::stoi(text);
    std::ifstream line(cat("/proc/", process, "/cmdline"), std::ios::binary);
    const std::string command{std::istreambuf_iterator<char>(line), {}};
    return command.find(folder_.path().string()) == std::string::npos ? 0 : process;
  }
  /// Throws where the newest checkpoint is not whole.
  void read_latest() const {
    const engine::CheckpointReader reader(engine::checkpoint_folder(folder_ / "run"));
    reader.verify_all();
  }
  bool saved() const { return fs::exists(folder_ / "run" / "latest"); }
  /// How a run goes on from what is there: one that was killed between its first checkpoint and the file that
  /// names it is told that checkpoint.
  std::vector<std::string> resuming() const {
    if (saved()) return {"--resume"};
    if (fs::exists(folder_ / "run"))
      for (const std::string& name : names())
        if (fs::exists(folder_ / "run" / name / "manifest.json")) return {"--resume", "--tag", name};
    return {};
  }
  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder_ / "run")) out.insert(entry.path().filename());
    return out;
  }
  bool saving() const {
    std::error_code gone;
    for (fs::directory_iterator at(folder_ / "run", gone), end; !gone && at != end; at.increment(gone))
      if (at->path().extension() == ".partial" && !left_.contains(at->path().filename())) return true;
    return false;
  }
  /// How a run is started and killed.
  struct Attempt {
    bool launched_ranks = false, on_nvme = false;
    int signal = SIGKILL;
    std::vector<int> ranks{0};  ///< whose processes are killed
    int milliseconds = 0;       ///< before that; then, with `saving`,
    bool saving = false;        ///< when the next checkpoint is being written,
    int microseconds = 0;       ///< and so long after that
  };
  /// The exit code, -1 after a signal.
  int run_and_kill(const Attempt& attempt) {
    for (const int rank : {0, 1}) fs::remove(folder_ / cat("pid", rank));
    left_ = fs::exists(folder_ / "run") ? names() : std::set<std::string>();
    const pid_t child = start_line(line(attempt.launched_ranks, attempt.on_nvme), "kill.err");
    std::this_thread::sleep_for(std::chrono::milliseconds(attempt.milliseconds));
    if (attempt.saving) {
      for (int looked = 0; !saving() && looked < 20'000; ++looked)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      std::this_thread::sleep_for(std::chrono::microseconds(attempt.microseconds));
    }
    killed_saving_ += saving();
    for (const int rank : attempt.ranks)
      if (const pid_t process = process_of(rank); process > 0) kill(process, attempt.signal);
    // A rank that has not met the others yet waits for them up to a minute.
    int status = 0;
    for (int waited = 0; waitpid(child, &status, WNOHANG) == 0; ++waited) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (waited < 1000) continue;
      for (const int rank : {0, 1})
        if (const pid_t process = process_of(rank); process > 0) kill(process, SIGKILL);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  /// The weights and states of the newest checkpoint, by name.
  std::map<std::string, std::vector<std::byte>> states() const {
    const engine::CheckpointReader reader(engine::checkpoint_folder(folder_ / "run"));
    std::map<std::string, std::vector<std::byte>> out;
    for (const auto& [file, checksum] : reader.manifest().files) {
      if (!file.ends_with(".safetensors")) continue;
      const tensor::SafetensorsFile tensors(reader.folder() / file);
      for (const tensor::SafetensorsEntry& entry : tensors.entries()) {
        std::vector<std::byte>& bytes = out[file + " " + entry.name];
        bytes.resize(entry.bytes);
        tensors.read_bytes(entry, 0, bytes);
      }
    }
    return out;
  }
  /// Each step's loss is that of the run that nobody disturbed, and of all of them where the run ended.
  void expect_same(const Losses& expected, bool ended) const {
    const Losses got = losses("m.jsonl");
    for (const auto& [step, loss] : got) EXPECT_EQ(loss, expected.at(step)) << "step " << step;
    if (ended) {
      EXPECT_EQ(got.size(), expected.size());
    }
  }

  std::set<std::string> left_;  ///< in the folder when the newest run began
  int killed_saving_ = 0;
};

TEST_F(Kill, AtAnyMomentLeavesAWholeCheckpointAndTheSameRun) {
  std::mt19937 random(static_cast<unsigned>(signed_from_environment("SHERD_KILL_SEED", 1)));
  auto undisturbed = run_of("whole.jsonl");
  undisturbed.insert(undisturbed.end(), {"--ranks", "2"});
  const auto start = std::chrono::steady_clock::now();
  const Outcome whole = sherd(undisturbed);
  ASSERT_EQ(whole.code, 0) << whole.err;
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
  const Losses expected = losses("whole.jsonl");
  ASSERT_EQ(expected.size(), std::size_t{steps});
  const auto last_states = states();
  ASSERT_FALSE(last_states.empty());
  fs::remove_all(folder_ / "run");

  const int rounds = signed_from_environment("SHERD_KILL_ROUNDS", 8);
  int killed = 0, partials = 0, runs = 0;
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    Attempt attempt;
    attempt.launched_ranks = random() % 2 == 0, attempt.on_nvme = random() % 2 == 0;
    attempt.saving = random() % 2 == 0;
    attempt.signal = random() % 3 == 0 ? SIGTERM : SIGKILL;
    // Processes lose one of them or both.
    if (attempt.launched_ranks && random() % 2 == 0) attempt.ranks = {1};
    if (attempt.launched_ranks && (attempt.signal == SIGTERM || random() % 3 == 0)) attempt.ranks = {0, 1};
    attempt.milliseconds = static_cast<int>(random() % static_cast<unsigned>(took.count() * 2 / 3));
    attempt.microseconds = static_cast<int>(random() % 5000);
    const int code = run_and_kill(attempt);
    const std::string context =
        cat("round ", round, attempt.launched_ranks ? ", processes" : ", threads",
            attempt.on_nvme ? ", NVMe" : "", attempt.saving ? ", saving" : "", ", signal ", attempt.signal,
            ", exit ", code, "\n", read_text(folder_ / "kill.err"));
    SCOPED_TRACE(context);
    killed += code != 0;
    if (!fs::exists(folder_ / "run")) continue;
    for (const std::string& name : names())
      partials += name.ends_with(".partial") || name.ends_with(".removed");
    if (saved()) {
      EXPECT_NO_THROW(read_latest());
    }
    EXPECT_EQ(count(read_text(folder_ / "kill.err"), "is in use by"), 0u);
    expect_same(expected, code == 0);
    if (code != 0) continue;
    ++runs;
    EXPECT_TRUE(states() == last_states);
    for (const char* left : {"run", "m.jsonl"}) fs::remove_all(folder_ / left);
  }
  RecordProperty("killed", killed), RecordProperty("saving", killed_saving_),
      RecordProperty("leftovers", partials), RecordProperty("completed", runs);
  std::cout << killed << " of " << rounds << " killed, " << killed_saving_ << " while they saved, "
            << partials << " leftovers seen, " << runs << " runs completed between\n";
  EXPECT_GT(killed, 0) << "nothing was tried";
  if (rounds >= 100) {
    EXPECT_GT(killed_saving_, 0) << "no run was killed while it saved";
  }
  if (HasFailure()) return;

  auto last = run_of("m.jsonl");
  last.insert(last.end(), {"--ranks", "2"});
  for (const std::string& option : resuming()) last.push_back(option);
  const Outcome ended = sherd(last);
  ASSERT_EQ(ended.code, 0) << ended.err;
  expect_same(expected, true);
  // The record that a rank wrote when it lost another one stays.
  std::set<std::string> there = names();
  std::erase_if(there, [](const std::string& name) { return name.starts_with("flight_recorder_rank_"); });
  EXPECT_EQ(there, (std::set<std::string>{cat("global_step", steps - 2), cat("global_step", steps), "latest",
                                          engine::steps_file}));
  read_latest();
  EXPECT_TRUE(states() == last_states);
  EXPECT_EQ(engine::RecordedSteps::read(folder_ / "run").steps.size(), static_cast<std::size_t>(steps));
  EXPECT_EQ(sherd({"verify", (folder_ / "run").string()}).code, 0);
}

}  // namespace
}  // namespace sherd::cli

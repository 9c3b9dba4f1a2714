#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "support/mpirun.h"
#include "support/places.h"
#include "support/temp_folder.h"

/// `sherd train` as a person runs it: the real program over a small dataset, on local ranks and under mpirun.
namespace sherd::cli {

using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::HasSubstr;

inline std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

struct Outcome {
  int code;
  std::string out, err;
};

class Train : public ::testing::Test {
 protected:
  Train() {
    std::string text;
    for (int i = 0; i < 400; ++i)
      text += cat("The ", i % 7, " shards of jar ", i % 13, " lie in row ", i % 5, ".\n\n");
    write_text(folder_ / "text.txt", text);
    write_text(folder_ / "c.json", cat(R"({
  "train_batch_size": 4,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
  "model": {"type": "gpt2", "seq_length": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 2},
  "data": {"path": ")",
                                       prefix(), R"(", "split": [0.9, 0.1]},
  "training": {"steps": 6, "save_dir": ")",
                                       (folder_ / "run").string(), R"(", "log_interval": 0},
  "parallel": {"timeout_seconds": 60}
})"));
    prepare_once();
    share_rates();
  }

  /// The dataset is made once in a program, and copied.
  void prepare_once() const {
    static const TempFolder made;
    const bool is_first = std::filesystem::is_empty(made.path());
    if (is_first) {
      const Outcome prepared = sherd({"prepare", "--input", (folder_ / "text.txt").string(), "--tokenizer",
                                      "byte", "--output", prefix()});
      require(prepared.code == 0, prepared.err);
    }
    const auto &from = is_first ? folder_ : made, &to = is_first ? made : folder_;
    for (const auto& entry : std::filesystem::directory_iterator(from.path())) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("data.")) std::filesystem::copy(entry.path(), to / name);
    }
  }
  /// All tests share what runs find of the machine's speed, which takes a run longer than its few steps.
  void share_rates() const {
    const auto rates = std::filesystem::path(SHERD_PROGRAM).parent_path() / "tests" / "rates";
    std::error_code none;
    std::filesystem::create_directories(rates, none);
    if (std::filesystem::is_directory(rates, none))
      std::filesystem::create_directory_symlink(rates, folder_ / "sherd");
  }
  /// This test's runs measure for themselves.
  void measure_apart() const { std::filesystem::remove(folder_ / "sherd"); }

  std::string prefix() const { return (folder_ / "data").string(); }
  std::string config() const { return (folder_ / "c.json").string(); }

  /// Runs a shell command line, which reads the file `input`, with a limit of two minutes; 124 when it took
  /// longer.
  Outcome shell(const std::string& command, const std::string& input = "/dev/null") const {
    const std::string out = (folder_ / "out").string(), err = (folder_ / "err").string();
    const int status = std::system(cat("XDG_CACHE_HOME=", folder_.path().string(), " timeout 120 ", command,
                                       " >", out, " 2>", err, " <", input)
                                       .c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(out), read_text(err)};
  }
  static std::string joined(const std::vector<std::string>& arguments) {
    const char* other = std::getenv("SHERD_TEST_PROGRAM");  // emulated_gpu/'s
    std::string line = other ? other : SHERD_PROGRAM;
    for (const std::string& argument : arguments) {
      line += " '";
      for (const char c : argument) line += c == '\'' ? "'\\''" : std::string(1, c);
      line += "'";
    }
    return line;
  }
  Outcome sherd(const std::vector<std::string>& arguments, const std::string& input = "/dev/null") const {
    return shell(joined(arguments), input);
  }
  /// Under mpirun; each rank's exit code ends up on stderr as "exit code N" (with --enable-recovery, without
  /// which the first rank to fail has the others killed before they can speak, mpirun itself always returns
  /// 0).
  Outcome sherd_mpi(int ranks, const std::vector<std::string>& arguments) const {
    return shell(cat(sherd::testing::mpirun(ranks, "--enable-recovery"),
                     R"(sh -c '"$@"; echo "exit code $?" >&2' sh )", joined(arguments)));
  }
  /// As processes that only the environment tells of each other, as torchrun's; exit codes as above. `before`
  /// is shell code that each rank runs first.
  std::string launched(int ranks, const std::vector<std::string>& arguments,
                       const std::string& before = "true") const {
    return cat(SHERD_SOURCE_DIR "/tests/support/launch.sh ", ranks, " sh -c '", before,
               R"(; "$@"; code=$?; echo "exit code $code" >&2; exit $code' sh )", joined(arguments));
  }
  Outcome sherd_launched(int ranks, const std::vector<std::string>& arguments,
                         const std::string& before = "true") const {
    return shell(launched(ranks, arguments, before));
  }
  std::vector<std::string> train(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> out{"train", "--config", config()};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  /// The values of a key in a metrics file, as text.
  std::vector<std::string> metric(const std::string& file, const std::string& key) const {
    std::vector<std::string> out;
    std::ifstream in(folder_ / file);
    for (std::string line; std::getline(in, line);) {
      const auto at = line.find("\"" + key + "\":");
      if (at == std::string::npos) continue;
      const auto begin = at + key.size() + 3;
      out.push_back(line.substr(begin, line.find_first_of(",}", begin) - begin));
    }
    return out;
  }

  /// Starts the program beside the test, with standard error in `errors`; stop it with kill() and waitpid().
  /// It dies with the test program at the latest.
  pid_t start(const std::vector<std::string>& arguments, const std::string& errors) const {
    return start_line(joined(arguments), errors);
  }
  pid_t start_line(const std::string& command, const std::string& errors) const {
    write_text(folder_ / errors, "");
    const std::string line = cat("exec env XDG_CACHE_HOME=", folder_.path().string(), " ", command, " >",
                                 (folder_ / "background.out").string(), " 2>", (folder_ / errors).string());
    const pid_t child = fork();
    if (child != 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
    _exit(127);
  }
  /// The process whose shell wrote its id to `file` before a program replaced it.
  pid_t noted_process(const std::string& file) const {
    const std::string text = read_text(folder_ / file);
    require(text.ends_with('\n') && text.find_first_not_of("0123456789") == text.size() - 1,
            "no process is noted in ", (folder_ / file).string(), ": '", text, "'");
    return std::stoi(text);
  }
  /// Waits up to a minute until a file has `text`, `times` times.
  void wait_for(const std::string& file, const std::string& text, std::size_t times = 1) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto found = [&] {
      return std::filesystem::exists(folder_ / file) && count(read_text(folder_ / file), text) >= times;
    };
    while (!found() && std::chrono::steady_clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ASSERT_TRUE(found()) << file << " lacks " << times << " times '" << text << "'";
  }

  TempFolder folder_;
};

}  // namespace sherd::cli

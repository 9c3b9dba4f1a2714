#include "cli/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include "config/keys.h"
#include "device/cuda.h"
#include "engine/report/machine.h"
#include "support/temp_folder.h"

namespace sherd::cli {
namespace {

using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;

struct CommandOutcome {
  int code;
  std::string out, err;
};

CommandOutcome run(const Arguments& arguments) {
  CaptureStdout();
  CaptureStderr();
  const int code = run_program(arguments);
  std::string out = GetCapturedStdout();
  return {code, std::move(out), GetCapturedStderr()};
}

/// One line on stderr with `part`, and this exit code.
void expect_failure(const Arguments& arguments, int code, const std::string& part) {
  const CommandOutcome outcome = run(arguments);
  EXPECT_EQ(outcome.code, code);
  EXPECT_THAT(outcome.err, StartsWith("sherd: error: "));
  EXPECT_THAT(outcome.err, HasSubstr(part));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
}

TEST(Program, EveryCommandHasHelp) {
  const CommandOutcome all = run({"--help"});
  EXPECT_EQ(all.code, 0);
  EXPECT_EQ(run({"-h"}).out, all.out);
  for (const char* command :
       {"train", "estimate", "plan", "tune", "verify", "generate", "prepare", "plot", "bench", "info"}) {
    EXPECT_THAT(all.out, HasSubstr(std::string("\n  ") + command + " "));
    const CommandOutcome help = run({command, "--help"});
    EXPECT_EQ(help.code, 0) << help.err;
    EXPECT_THAT(help.out, HasSubstr(std::string("sherd ") + command));
    const CommandOutcome brief = run({command, "-h"});
    EXPECT_EQ(brief.code, 0) << brief.err;
    EXPECT_EQ(brief.out, help.out);
  }
}

TEST(Program, WithoutACommandItSaysWhichThereAre) {
  const CommandOutcome bare = run({});
  EXPECT_EQ(bare.code, 2);
  EXPECT_EQ(bare.out, "");
  EXPECT_EQ(bare.err, run({"--help"}).out);
}

TEST(Program, WrongCommandLinesEndWithTwo) {
  expect_failure({"tain"}, 2, "did you mean 'train'?");
  expect_failure({"bogus"}, 2, "unknown command 'bogus'; known are init, train, launch, estimate, ");
  expect_failure({"--confg", "x"}, 2, "'--confg' is an option, and a command comes first");
  expect_failure({"info", "--gem"}, 2, "did you mean '--gemm'?");
  expect_failure({"prepare"}, 2, "--input is missing");
  expect_failure({"plot", "--metrics", "m"}, 2, "--output is missing");
  expect_failure({"train", "--config", "c", "--metrics-address", "::1"}, 2, "give both");
  expect_failure({"train", "--config", "c", "--metrics-port", "65536"}, 2, "must be at most 65535");
  expect_failure({"train", "--config", "c", "--metrics-textfile", "m"}, 2, "needs a name that ends in .prom");
  expect_failure({"train", "--config", "c", "--set", "seed=1", "model.seed=2"}, 2,
                 "its own --set: --set model.seed=2");
}

TEST(Program, OtherErrorsEndWithOne) {
  TempFolder folder;
  expect_failure({"plot", "--metrics", folder / "none", "--output", folder / "x.svg"}, 1, "No such file");
  expect_failure({"prepare", "--input", folder / "none", "--output", folder / "x"}, 1, "none");
  write_text(folder / "two\nlines", "no metrics");
  write_text(folder / "bad.jsonl", "no metrics\n");
  expect_failure({"plot", "--metrics", folder / "bad.jsonl", "--output", folder / "x.svg"}, 1, "line 1");
  expect_failure({"plot", "--metrics", folder / "bad.jsonl", "--output", folder / "bad.jsonl"}, 2,
                 "would be lost");
  expect_failure({"plot", "--metrics", folder / "two\nlinez", "--output", folder / "x.svg"}, 1, "two linez");
}

TEST(Program, ErrorsQuoteNoMoreThanAFewWords) {
  const std::string x(10'000'000, 'x');
  for (const Arguments& arguments :
       std::vector<Arguments>{{x},
                              {"-" + x},
                              {"train", "--" + x},
                              {"train", "-" + x},
                              {"info", x},
                              {"train", "--ranks", x},
                              {"train", "--ranks", "1" + std::string(10'000'000, '0')},
                              {"train", "--config", x},
                              {"train", "--config", "/dev/null", "--set", x},
                              {"bench", x}}) {
    const CommandOutcome outcome = run(arguments);
    EXPECT_NE(outcome.code, 0);
    EXPECT_THAT(outcome.err, StartsWith("sherd: error: "));
    EXPECT_LT(outcome.err.size(), 1100u) << outcome.err;
  }
  for (const Arguments& paths : std::vector<Arguments>{{"prepare", "--input", x, "--output", "y"},
                                                       {"plot", "--metrics", x, "--output", "y"},
                                                       {"generate", "--checkpoint", x, "--prompt", "y"}})
    EXPECT_LT(run(paths).err.size(), 4200u) << paths[0];
  EXPECT_THAT(run({"\x1b[2J"}).err, HasSubstr("unknown command '\\x1b[2J'"));
}

TEST(Program, InfoKnowsThisMachine) {
  const CommandOutcome info = run({"info"});
  EXPECT_EQ(info.code, 0) << info.err;
  for (const char* part :
       {"oneDNN 2", "oneTBB", "SentencePiece", "usable core", "GiB available", "io_uring", "local"})
    EXPECT_THAT(info.out, HasSubstr(part));
  EXPECT_THAT(info.out, Not(HasSubstr(" 1 usable cores")));
  if (device::cuda_status().built) {
    EXPECT_THAT(info.out,
                ContainsRegex("(no cuDNN|cuDNN [0-9]+\\.[0-9.]+).*, (no NCCL|NCCL [0-9]+\\.[0-9.]+)"));
  }
  EXPECT_GT(engine::memory_sizes().total, 0u);
  EXPECT_GE(engine::memory_sizes().total, engine::memory_sizes().available);
  const auto told = [](const char* size) {
    ::setenv("SHERD_MACHINE_MEMORY", size, 1);
    const CommandOutcome outcome = run({"info"});
    ::unsetenv("SHERD_MACHINE_MEMORY");
    return outcome;
  };
  EXPECT_THAT(told("128GiB").out, HasSubstr("128 GiB, 128 GiB available"));
  EXPECT_EQ(told("much").code, 2);
  EXPECT_THAT(told("much").err, HasSubstr("a size such as \"128GB\", not 'much'"));
}

TEST(Program, InfoPrintsTheKeysAlone) {
  const CommandOutcome keys = run({"info", "--keys"});
  EXPECT_EQ(keys.code, 0) << keys.err;
  EXPECT_TRUE(keys.out == config::keys_page()) << keys.out.substr(0, 200);
  const CommandOutcome schema = run({"info", "--schema"});
  EXPECT_EQ(schema.code, 0) << schema.err;
  EXPECT_TRUE(schema.out == config::json_schema()) << schema.out.substr(0, 200);
  expect_failure({"info", "--keys", "--gemm"}, 2, "ask one at a time");
  expect_failure({"info", "--keys", "--schema"}, 2, "ask one at a time");
  expect_failure({"info", "--keys", "--flight-recorder", "x"}, 2, "ask one at a time");
}

TEST(Program, TellsItsOwnProcessorTimeFromThatOfOthers) {
  const engine::ProcessorTimes now = engine::processor_times();
  EXPECT_GT(now.busy, 0);
  EXPECT_GE(now.all, now.busy);
  EXPECT_EQ(engine::share_of_others({100, 40, 2}, {200, 100, 42}), 0.2);
  EXPECT_EQ(engine::share_of_others({100, 40, 2}, {200, 60, 42}), 0);  // ticks are coarse
  EXPECT_EQ(engine::share_of_others({}, {}), 0);
}

/// A write to a closed pipe fails here, and ends other programs as ever.
TEST(Program, KeepsFromProgramsItStartsHowItTreatsSignals) {
  struct sigaction before[2];
  const int signals[] = {SIGPIPE, SIGXFSZ};
  struct sigaction usual {};  // services inherit SIGPIPE as ignored
  usual.sa_handler = SIG_DFL;
  for (int i = 0; i < 2; ++i) ::sigaction(signals[i], &usual, &before[i]);
  prepare_process();
  for (const int signal : signals) {
    EXPECT_EQ(std::raise(signal), 0);
    const int status = std::system(("kill -s " + std::to_string(signal) + " $$").c_str());
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << signal << ": " << status;
  }
  for (int i = 0; i < 2; ++i) ::sigaction(signals[i], &before[i], nullptr);
}

TEST(Program, PreparesAndPlots) {
  TempFolder folder;
  write_text(folder / "text.txt", "one two three\n\nfour five six\n");
  const CommandOutcome prepared =
      run({"prepare", "--input", folder / "text.txt", "--tokenizer", "byte", "--output", folder / "d"});
  EXPECT_EQ(prepared.code, 0) << prepared.err;
  EXPECT_THAT(prepared.out, HasSubstr("tokens in 2 documents"));
  EXPECT_THAT(prepared.out, HasSubstr("unigram entropy"));
  EXPECT_TRUE(std::filesystem::exists(folder / "d.bin"));
  EXPECT_TRUE(std::filesystem::exists(folder / "d.idx"));

  write_text(folder / "m.jsonl", "{\"step\":1,\"loss\":9.5}\n{\"step\":2,\"loss\":9.0,\"val_loss\":9.25}\n");
  const CommandOutcome plotted = run({"plot", "--metrics", folder / "m.jsonl", "--output",
                                      folder / "loss.svg", "--unigram-entropy", "6.5", "--title", "T"});
  EXPECT_EQ(plotted.code, 0) << plotted.err;
  EXPECT_THAT(read_text(folder / "loss.svg"), HasSubstr("unigram entropy 6.50"));
}

}  // namespace
}  // namespace sherd::cli

// `sherd launch`: ranks as processes, on this machine and on what stands for others; faults and restarts.
#include <signal.h>

#include <set>
#include <sstream>
#include <thread>

#include "cli/launch/children.h"
#include "cli/train_fixture.h"
#include "support/places.h"

namespace sherd::cli {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;

class LaunchProgram : public Train {
 protected:
  LaunchProgram() {
    // A script stands for ssh HOST COMMAND.
    write_text(folder_ / "ssh",
               "echo \"$1\" >> " + (folder_ / "reached").string() + "\nshift\nexec sh -c \"$*\"\n");
  }
  Outcome launch(std::vector<std::string> options, const std::vector<std::string>& command) const {
    options.insert(options.begin(), "launch");
    options.emplace_back("--");
    options.insert(options.end(), command.begin(), command.end());
    return sherd(options);
  }
  std::vector<std::string> program(const std::string& metrics, std::vector<std::string> more = {}) const {
    more.insert(more.end(),
                {"--metrics", (folder_ / metrics).string(), "--set", "device.threads_per_rank=1"});
    std::vector<std::string> out = train(more);
    out.insert(out.begin(), SHERD_PROGRAM);
    return out;
  }
  /// The losses of all steps, each as it was told last: what came after the last checkpoint ran again.
  std::map<std::string, std::string> losses(const std::string& metrics) const {
    const std::vector<std::string> steps = metric(metrics, "step"), values = metric(metrics, "loss");
    std::map<std::string, std::string> out;
    for (std::size_t i = 0; i < std::min(steps.size(), values.size()); ++i) out[steps[i]] = values[i];
    return out;
  }
  /// As one process with that many threads has them.
  void expect_losses_of_threads(const std::string& metrics, int ranks, std::size_t steps = 6,
                                std::vector<std::string> more = {}) {
    std::filesystem::remove_all(folder_ / "run");
    more.insert(more.end(), {"--ranks", std::to_string(ranks)});
    std::vector<std::string> words = program("threads.jsonl", more);
    words.erase(words.begin());
    const Outcome threads = sherd(words);
    ASSERT_EQ(threads.code, 0) << threads.err;
    EXPECT_EQ(losses(metrics), losses("threads.jsonl"));
    EXPECT_EQ(losses(metrics).size(), steps);
  }
  std::vector<std::string> shell_line(const std::string& text) const { return {"sh", "-c", text}; }
};

bool is_there(int process) {
  std::ifstream in(cat("/proc/", process, "/stat"));
  std::string word, name, state;
  return in >> word >> name >> state && state != "Z";
}
bool ends(int process) {
  for (int turn = 0; turn < 1000 && is_there(process); ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return !is_there(process);
}

TEST_F(LaunchProgram, StartsRanksOnThisMachine) {
  const Outcome got = launch({"--ranks", "2"}, program("launched.jsonl"));
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, HasSubstr("over tcp(2)"));
  EXPECT_THAT(cat("\n", got.out, got.err), HasSubstr("\n[0] "));
  expect_losses_of_threads("launched.jsonl", 2);
}

TEST_F(LaunchProgram, StartsRanksOnHosts) {
  write_text(folder_ / "hosts", "# two machines\nfirst slots=1\n\nsecond slots=2  # the larger one\n");
  const std::vector<std::string> hosts{"--hosts",   (folder_ / "hosts").string(),
                                       "--ssh",     "sh " + (folder_ / "ssh").string(),
                                       "--address", "127.0.0.1",
                                       "--port",    std::to_string(20000 + ::getpid() % 9000)};
  const Outcome places =
      launch(hosts, shell_line("echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE 'it''s'"));
  ASSERT_EQ(places.code, 0) << places.err;
  for (const char* place :
       {"[0] rank 0 of 3, 0 of 1 its", "[1] rank 1 of 3, 0 of 2 its", "[2] rank 2 of 3, 1 of 2 its"})
    EXPECT_THAT(places.out, HasSubstr(place));
  EXPECT_THAT(read_text(folder_ / "reached"), AllOf(HasSubstr("first\n"), HasSubstr("second\n")));
  const Outcome got = launch(hosts, program("hosts.jsonl", {"--set", "train_batch_size=12"}));
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_EQ(metric("hosts.jsonl", "loss").size(), 6u);
  const Outcome failed = launch(hosts, shell_line("if [ $RANK = 2 ]; then exit 7; fi"));
  EXPECT_EQ(failed.code, 7) << failed.err;
  EXPECT_THAT(failed.err, HasSubstr("rank 2 on second ended with exit code 7"));
  EXPECT_THAT(failed.err,
              AllOf(ContainsRegex("sherd launch: rank 0 on first has pid [0-9]+\n"),
                    ContainsRegex("sherd launch: ranks 1-2 on second have pids [0-9]+ [0-9]+\n")));
}

TEST_F(LaunchProgram, TellsWhichProcessesRanksAre) {
  const Outcome got = launch({"--ranks", "3"}, shell_line("echo $$"));
  ASSERT_EQ(got.code, 0) << got.err;
  std::string pids;
  for (const char* rank : {"[0] ", "[1] ", "[2] "}) {
    const std::size_t at = got.out.find(rank);
    ASSERT_NE(at, std::string::npos) << got.out;
    pids += " " + got.out.substr(at + 4, got.out.find('\n', at) - at - 4);
  }
  EXPECT_EQ(got.err, cat("sherd launch: ranks 0-2 have pids", pids, "\n"));
}

TEST_F(LaunchProgram, TellsASignalFromAnExitCode) {
  const Outcome killed = launch({"--ranks", "2"}, shell_line("[ $RANK = 0 ] || kill -9 $$"));
  EXPECT_EQ(killed.code, 137);
  EXPECT_THAT(killed.err, HasSubstr("sherd launch: rank 1 was killed by signal 9 (SIGKILL)\n"));
  const Outcome ended = launch({"--ranks", "2"}, shell_line("[ $RANK = 0 ] || exit 137"));
  EXPECT_EQ(ended.code, 137);
  EXPECT_THAT(ended.err, HasSubstr("sherd launch: rank 1 ended with exit code 137\n"));
  EXPECT_EQ(ending_of(128 + SIGRTMIN, true), cat("was killed by signal ", SIGRTMIN));
}

/// The others find out themselves, or are ended once the grace is over; so are their children.
TEST_F(LaunchProgram, ARankThatFailsEndsAll) {
  const std::string note = (folder_ / "asleep").string();
  const Outcome got =
      launch({"--ranks", "2", "--grace", "0.5"},
             shell_line(cat("if [ $RANK = 1 ]; then exit 9; fi; sleep 1000 & echo $! > ", note, "; wait")));
  EXPECT_EQ(got.code, 9);
  EXPECT_THAT(got.err, HasSubstr("rank 1 ended with exit code 9"));
  EXPECT_TRUE(ends(std::stoi(read_text(note))));
}

TEST_F(LaunchProgram, BeginsAgainWhereARankIsKilled) {
  // Rank 1 is killed once, when its run has a checkpoint.
  const std::string once = (folder_ / "once").string(), saved = (folder_ / "run/latest").string();
  std::vector<std::string> words = shell_line(
      cat("if [ $RANK = 1 ] && mkdir ", once, " 2> /dev/null; then \"$@\" & child=$!; while [ ! -e ", saved,
          " ] && kill -0 $child; do sleep 0.01; done; kill -9 $child; wait $child; exit; fi; exec \"$@\""));
  words.emplace_back("sh");
  const std::vector<std::string> longer{
      "--set", "training.save_interval=20", "--set", "training.keep_last=3", "--steps", "300"};
  std::vector<std::string> more = longer;
  more.emplace_back("--resume-or-start");
  for (const std::string& word : program("again.jsonl", more)) words.push_back(word);
  const Outcome got = launch({"--ranks", "2", "--restarts", "2", "--grace", "20"}, words);
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, HasSubstr("restart 1 of 2"));
  EXPECT_EQ(count(got.err, "restart 2 of 2"), 0u);
  EXPECT_THAT(got.err, HasSubstr("resumed from"));
  expect_losses_of_threads("again.jsonl", 2, 300, longer);
}

/// There is no checkpoint of files yet.
TEST_F(LaunchProgram, GoesOnFromALocalCheckpoint) {
  const std::string once = (folder_ / "once").string(), local = (folder_ / "local").string();
  std::filesystem::create_directory(local);
  std::vector<std::string> words = shell_line(cat("if [ $RANK = 1 ] && mkdir ", once,
                                                  " 2> /dev/null; then \"$@\" & child=$!; while ! ls ", local,
                                                  "/*/global_step*[0-9a-f]/manifest.json > /dev/null 2>&1 && "
                                                  "kill -0 $child; do sleep 0.01; done; kill -9 "
                                                  "$child; wait $child; exit; fi; exec \"$@\""));
  words.emplace_back("sh");
  const std::vector<std::string> longer{"--set",   "training.local_save_interval=5",
                                        "--set",   "training.local_save_dir=" + local,
                                        "--steps", "240"};
  std::vector<std::string> more = longer;
  more.emplace_back("--resume-or-start");
  for (const std::string& word : program("local.jsonl", more)) words.push_back(word);
  const Outcome got = launch({"--ranks", "2", "--restarts", "1", "--backoff", "0.1", "--grace", "20"}, words);
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, HasSubstr("resumed from a local checkpoint at step "));
  EXPECT_TRUE(std::filesystem::is_empty(local)) << "all is in the run's folder";
  expect_losses_of_threads("local.jsonl", 2, 240, {"--steps", "240"});
}

TEST_F(LaunchProgram, RestartsAreBounded) {
  const std::string tries = (folder_ / "tries").string();
  const Outcome got = launch({"--ranks", "1", "--restarts", "1"},
                             shell_line(cat("echo x$TORCHELASTIC_RESTART_COUNT >> ", tries, "; exit 5")));
  EXPECT_EQ(got.code, 5);
  EXPECT_EQ(read_text(tries), "x0\nx1\n");
  EXPECT_THAT(got.err, HasSubstr("the restart has been used"));
  // A wrong command line would come again.
  const Outcome wrong =
      launch({"--ranks", "1", "--restarts", "1"}, shell_line(cat("echo y >> ", tries, "; exit 2")));
  EXPECT_EQ(wrong.code, 2);
  EXPECT_EQ(read_text(tries), "x0\nx1\ny\n");
  const Outcome mistyped = launch({"--ranks", "2", "--restarts", "3"},
                                  program("m.jsonl", {"--resume-or-start", "--set", "gradient_cliping=1"}));
  EXPECT_EQ(mistyped.code, 2);
  EXPECT_THAT(mistyped.err,
              ContainsRegex("rank [01] ended with exit code 2, and would end so again: it is not "
                            "started again\n$"));
  EXPECT_EQ(count(mistyped.err, "did you mean"), 2u) << "a line of each rank: " << mistyped.err;
}

TEST_F(LaunchProgram, PassesSignalsOnAndLeavesNothing) {
  for (const int signal : {SIGINT, SIGKILL}) {
    const std::filesystem::path note = folder_ / cat("number", signal);
    // A rank that ends by itself when it is asked.
    const std::string rank = cat("trap 'echo asked; exit 3' INT TERM; echo $$ > ", note.string(), ".$RANK; ",
                                 "while :; do sleep 0.05; done");
    std::vector<std::string> words{"launch", "--ranks", "2", "--", "sh", "-c", rank};
    const pid_t run = start_line(joined(words), "launch.err");
    const auto is_written = [&](int i) {
      std::error_code none;
      return std::filesystem::file_size(cat(note.string(), ".", i), none) > 1 && !none;
    };
    for (int turn = 0; turn < 1500 && !(is_written(0) && is_written(1)); ++turn)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ::kill(run, signal);
    int status = 0;
    ASSERT_EQ(::waitpid(run, &status, 0), run);
    if (signal == SIGINT) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3)
          << status << read_text(folder_ / "launch.err");
    }
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(ends(std::stoi(read_text(cat(note.string(), ".", i))))) << signal;
  }
}

/// As the launcher of one host has it from the launcher of all.
TEST_F(LaunchProgram, FollowsItsInput) {
  const std::string rank =
      "trap 'echo interrupted; exit 4' INT; trap 'echo asked; exit 5' TERM; "
      "while :; do sleep 0.05; done";
  const std::string node =
      joined({"launch", "--host-list", "here=2", "--node", "0", "--follow-input", "--", "sh", "-c", rank});
  for (const auto& [input, code, said] :
       {std::tuple{"sleep 2; echo signal 2; sleep 2", 4, "[1] interrupted"}, {"sleep 2", 5, "[0] asked"}}) {
    write_text(folder_ / "node.sh", cat("(", input, ") | ", node, "\n"));
    const Outcome got = shell("sh " + (folder_ / "node.sh").string());
    EXPECT_EQ(got.code, code) << got.err;
    EXPECT_THAT(got.out, HasSubstr(said));
  }
}

/// A program that a shell starts has the signal, too, and time to end by itself.
TEST_F(LaunchProgram, WhatARankHasStartedMayEndByItself) {
  const std::string note = (folder_ / "ended").string(), begun = (folder_ / "begun").string();
  const std::string inner = cat("trap \"sleep 0.5; echo x > ", note, "; exit 0\" TERM; echo x > ", begun,
                                "; while :; do sleep 0.05; done");
  const pid_t run = start_line(
      joined({"launch", "--ranks", "1", "--grace", "60", "--", "sh", "-c", cat("sh -c '", inner, "'; true")}),
      "launch.err");
  for (int turn = 0; turn < 1500 && !std::filesystem::exists(begun); ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto asked = std::chrono::steady_clock::now();
  ::kill(run, SIGTERM);
  int status = 0;
  ASSERT_EQ(::waitpid(run, &status, 0), run);
  EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(40))
      << "the signal came with the grace";
  EXPECT_TRUE(std::filesystem::exists(note));
}

TEST_F(LaunchProgram, SaysWhatItCannotDo) {
  const auto refused = [&](const std::vector<std::string>& options, const std::vector<std::string>& command,
                           int code, const std::string& text) {
    const Outcome got = launch(options, command);
    EXPECT_EQ(got.code, code) << got.err;
    EXPECT_THAT(got.err, HasSubstr(text));
    EXPECT_EQ(count(got.err, "\n"), 1u) << got.err;
  };
  refused({"--ranks", "2"}, {}, 2, "launch needs a program behind --");
  refused({"--host-list", "a=2", "--hosts", "F"}, {"true"}, 2, "exclude each other");
  refused({"--host-list", "a=2,b=+1+x"}, {"true"}, 2, "--host-list takes HOST=RANKS");
  refused({"--host-list", "a=2", "--ranks", "3"}, {"true"}, 2, "ranks");
  refused({"--ranks", "2", "--min-ranks", "1"}, {"true"}, 2, "give --restarts, too");
  refused({"--hosts", (folder_ / "none").string()}, {"true"}, 1, "cannot read the hosts' file");
  write_text(folder_ / "wrong", "a slots=2\nb gpus=4\n");
  refused({"--hosts", (folder_ / "wrong").string()}, {"true"}, 2, "wrong:2: 'gpus=4' is not understood");
  write_text(folder_ / "many", "a slots=99999999999\n");
  refused({"--hosts", (folder_ / "many").string()}, {"true"}, 2,
          "many:1: 'slots=99999999999' is not understood");
  write_text(folder_ / "twice", "a slots=2\na slots=4\n");
  refused({"--hosts", (folder_ / "twice").string()}, {"true"}, 2, "twice:2: a stands there twice");
  refused({"--ranks", "2", "--restarts", "1"}, {"sherd", "train", "--config", "c"}, 2, "--resume-or-start");
  const Outcome missing = launch({"--ranks", "1"}, {"/no/such/program"});
  EXPECT_EQ(missing.code, 127);
  EXPECT_THAT(missing.err, HasSubstr("cannot start the program: No such file"));
}

/// Ranks of places that fail, for what becomes of the others. Each try writes who was there.
class Supervisor : public LaunchProgram {
 protected:
  Supervisor() { write_text(folder_ / "hosts", "a slots=2\nb slots=2\n"); }
  /// `rank`: what each does, which sees $SHERD_HOST, $TRY and torchrun's variables.
  std::vector<std::string> words(std::vector<std::string> options, const std::string& rank) const {
    const std::string there = (folder_ / "there").string(), gpus = (folder_ / "gpus.").string();
    write_text(
        folder_ / "ssh",
        cat("host=$1; shift; if [ -e ", (folder_ / "down.").string(), "$host ]; then exit 255; fi\n",
            "if [ \"$*$(cat ", (folder_ / "slow").string(), " 2> /dev/null)\" = trueyes ]; then echo x > ",
            (folder_ / "asked").string(), "; sleep 100; fi\nunset CUDA_VISIBLE_DEVICES\nif [ -e ", gpus,
            "$host ]; then export CUDA_VISIBLE_DEVICES=$(cat ", gpus,
            "$host); fi\nexport SHERD_HOST=$host; exec sh -c \"$*\"\n"));
    options.insert(options.begin(), "launch");
    options.insert(options.end(),
                   {"--hosts", (folder_ / "hosts").string(), "--ssh", "sh " + (folder_ / "ssh").string(),
                    "--address", "127.0.0.1", "--backoff", "0.05", "--grace", "1", "--", "sh", "-c",
                    cat("TRY=${TORCHELASTIC_RUN_ID##*.}; echo \"$TRY $SHERD_HOST$LOCAL_RANK $WORLD_SIZE "
                        "$CUDA_VISIBLE_DEVICES\" >> ",
                        there, "; ", rank)});
    return options;
  }
  Outcome run(const std::vector<std::string>& options, const std::string& rank) const {
    return sherd(words(options, rank));
  }
  /// The lines of a try, in order.
  std::set<std::string> there(int number) const {
    std::set<std::string> out;
    std::istringstream in(read_text(folder_ / "there"));
    for (std::string line; std::getline(in, line);)
      if (line.starts_with(cat(number, " "))) out.insert(line.substr(line.find(' ') + 1));
    return out;
  }
  using Lines = std::set<std::string>;
};

TEST_F(Supervisor, APlaceThatHasFailedThriceIsLeftOutAndASpareOneStepsIn) {
  // Others end with the code of ranks that miss one.
  const std::string fails =
      "if [ $TORCHELASTIC_RESTART_COUNT != $TRY ]; then exit 2; fi; "
      "if [ $SHERD_HOST$CUDA_VISIBLE_DEVICES$LOCAL_RANK = a0 ]; then exit 9; fi; "
      "if [ $TRY -lt 3 ]; then sleep 0.3; exit 4; fi";
  const Outcome got = run({"--ranks", "3", "--restarts", "5"}, fails);
  ASSERT_EQ(got.code, 0) << got.err;
  for (int number = 0; number < 3; ++number) EXPECT_EQ(there(number), (Lines{"a0 3 ", "a1 3 ", "b0 3 "}));
  EXPECT_EQ(there(3), (Lines{"a0 3 1", "b0 3 ", "b1 3 "})) << "slot 1 of a is its only one now";
  EXPECT_THAT(got.err, HasSubstr("rank 0 on a has failed 3 times: slot 0 of a is left out"));
  EXPECT_THAT(got.err, HasSubstr("sherd launch: rank 0 ended with exit code 9: restart 3 of 5"));
  EXPECT_EQ(count(got.err, "pid"), 8u) << "one line of each host and try: " << got.err;
  EXPECT_EQ(count(got.out, "failed") + count(got.err, "\x02"), 0u) << "what launchers tell each other";
}

TEST_F(Supervisor, WhereNoneMayBeLeftOutItGoesOnUntilItsRestartsAreUsed) {
  const Outcome got = run({"--restarts", "3"}, "if [ $SHERD_HOST$LOCAL_RANK = b1 ]; then exit 9; fi; exit 4");
  EXPECT_EQ(got.code, 9) << got.err;
  EXPECT_EQ(there(3).size(), 4u);
  EXPECT_EQ(count(got.err, "left out"), 0u);
  EXPECT_THAT(got.err, HasSubstr("rank 3 ended with exit code 9, and all restarts have been used"));
  // Also of ranks elsewhere a signal is told as one.
  const Outcome killed =
      run({"--restarts", "1"}, "if [ $SHERD_HOST$LOCAL_RANK = b1 ]; then kill -9 $$; fi; exit 4");
  EXPECT_EQ(killed.code, 137) << killed.err;
  EXPECT_THAT(killed.err, HasSubstr("rank 3 was killed by signal 9 (SIGKILL): restart 1 of 1"));
  EXPECT_EQ(run({}, "exit 4").code, 4) << "all only miss each other";
}

TEST_F(Supervisor, WhereAllFailAlikeNoPlaceIsLeftOut) {
  const Outcome got = run({"--restarts", "3", "--min-ranks", "1"}, "exit 9");
  EXPECT_EQ(got.code, 9) << got.err;
  EXPECT_EQ(there(3).size(), 4u);
  EXPECT_EQ(count(got.err, "left out"), 0u);
}

/// Its launcher is killed, so that nobody tells of its ranks.
TEST_F(Supervisor, AHostThatIsLostThriceIsLeftOut) {
  const std::string sign = (folder_ / "lost.$TRY").string();
  const std::string lost =
      cat("if [ $TRY -lt 3 ]; then if [ $SHERD_HOST$LOCAL_RANK = b1 ]; then echo x > ", sign,
          "; kill -9 $PPID; fi; while [ ! -e ", sign, " ]; do sleep 0.02; done; sleep 0.1; exit 4; fi");
  const Outcome got = run({"--restarts", "3", "--min-ranks", "2"}, lost);
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_TRUE(there(2).contains("b1 4 "));
  EXPECT_EQ(there(3), (Lines{"a0 2 ", "a1 2 "}));
  EXPECT_THAT(got.err, AllOf(HasSubstr("slot 0 of b is left out"), HasSubstr("slot 1 of b is left out")));
}

/// A signal ends all, also between two tries.
TEST_F(Supervisor, BeginsNoTryAfterASignal) {
  write_text(folder_ / "hosts", "a slots=1\n");
  const auto ends_with = [&](const std::string& rank, const std::string& sign) {
    const pid_t process = start_line(joined(words({"--restarts", "3"}, rank)), "launch.err");
    for (int turn = 0; turn < 1500 && !std::filesystem::exists(folder_ / sign); ++turn)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ::kill(process, SIGTERM);
    int status = 0;
    EXPECT_EQ(::waitpid(process, &status, 0), process);
    EXPECT_TRUE(there(1).empty()) << read_text(folder_ / "launch.err");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const std::string begun = (folder_ / "begun").string();
  EXPECT_EQ(
      ends_with(cat("trap 'exit 9' TERM; echo x > ", begun, "; for i in $(seq 100); do sleep 0.05; done"),
                "begun"),
      9);
  // The second time while the hosts are asked.
  EXPECT_EQ(ends_with(cat("printf yes > ", (folder_ / "slow").string(), "; exit 9"), "asked"), 128 + SIGTERM);
}

TEST(SupervisorChildren, ThatTakeTooLongAreEnded) {
  const auto begin = std::chrono::steady_clock::now();
  const ChildrenEnd end = run_children({{"one", {"sleep", "100"}}, {"another", {"true"}}},
                                       {.grace_seconds = 0.2, .quiet = true, .most_seconds = 0.2});
  ASSERT_EQ(end.failures.size(), 1u);
  EXPECT_TRUE(end.failures[0].program == 0 && end.failures[0].ended_by_us);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

/// The ranks that miss it say so; it is the one that has to be killed.
TEST_F(Supervisor, ARankThatHangsIsTheOneThatFailed) {
  const std::string hangs =
      "if [ $TRY -lt 3 ]; then if [ $SHERD_HOST$LOCAL_RANK = b1 ]; then exec sleep 100; fi; exit 4; fi";
  write_text(folder_ / "hosts", "a slots=1\nb slots=3\n"), write_text(folder_ / "gpus.b", "u,v,w");
  const Outcome got = run({"--restarts", "4", "--min-ranks", "1"}, hangs);
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_EQ(there(3), (Lines{"a0 3 ", "b0 3 u,w", "b1 3 u,w"}));
  EXPECT_THAT(got.err, HasSubstr("rank 2 on b has failed 3 times: slot 1 of b is left out"));
  EXPECT_THAT(got.err,
              HasSubstr("rank 2, which others missed and which had to be ended, was killed by signal "
                        "15 (SIGTERM): restart 1 of 4"));
}

TEST_F(Supervisor, AHostThatDoesNotAnswerIsLeftOutUntilItDoes) {
  const std::string down = (folder_ / "down.b").string();
  const std::string falls =
      cat("case $TRY in 0) touch ", down, "; exit 4;; 1) exit 137;; 2) rm -f ", down, "; exit 137;; esac");
  const Outcome got = run({"--restarts", "4", "--min-ranks", "2"}, falls);
  ASSERT_EQ(got.code, 0) << got.err;
  for (const int number : {1, 2}) EXPECT_EQ(there(number), (Lines{"a0 2 ", "a1 2 "}));
  EXPECT_EQ(there(3).size(), 4u);
  EXPECT_THAT(got.err, AllOf(HasSubstr("b does not answer"), HasSubstr("b answers again")));
  // Where it is needed the tries are used up.
  write_text(folder_ / "down.b", "");
  const Outcome needed = run({"--restarts", "2"}, "exit 0");
  EXPECT_NE(needed.code, 0);
  EXPECT_THAT(needed.err, HasSubstr("only 2 places left, and --min-ranks is 4"));
}

/// Some may miss one that has ended before they come so far.
TEST_F(Supervisor, NumbersOfRanksThatTheProgramRefusesArePassedOver) {
  const std::string down = (folder_ / "down.b").string();
  write_text(folder_ / "hosts", "a slots=3\nb slots=1\n");
  const std::string even = cat("if [ $TRY = 0 ]; then touch ", down,
                               "; exit 4; fi; if [ $WORLD_SIZE = 3 ]; then exit $((LOCAL_RANK ? 4 : 2)); fi; "
                               "if [ $TRY = 2 ]; then exit 9; fi");
  const Outcome got = run({"--restarts", "2", "--min-ranks", "2"}, even);
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_EQ(there(1).size(), 3u);
  for (const int number : {2, 3}) EXPECT_EQ(there(number), (Lines{"a0 2 ", "a1 2 "}));
  EXPECT_THAT(got.err, HasSubstr("restart 2 of 2")) << "it costs no restart";
  EXPECT_THAT(got.err, HasSubstr("the program does not take 3 ranks: that is what the errors above say, and "
                                 "no failure; it is tried with 2 next\n"));
}

/// Another error may pass by itself, and need not be one of the configuration, which ends all.
TEST_F(Supervisor, OnlyAWrongConfigurationRefusesANumberOfRanks) {
  const std::string down = (folder_ / "down.b").string();
  const auto with_three = [&](const std::string& does) {
    return cat("case $TRY in 0) touch ", down, "; exit 4;; 1) ", does, ";; *) exit 0;; esac");
  };
  write_text(folder_ / "hosts", "a slots=3\nb slots=1\n");
  const Outcome other = run({"--restarts", "3", "--min-ranks", "1"}, with_three("exit 1"));
  EXPECT_EQ(other.code, 0) << other.err;
  EXPECT_EQ(there(2).size(), 3u) << "the same number again";
  EXPECT_THAT(other.err, HasSubstr("restart 2 of 3"));
  EXPECT_EQ(count(other.err, "does not take"), 0u) << other.err;
  std::filesystem::remove(down), std::filesystem::remove(folder_ / "there");
  const Outcome one = run({"--restarts", "3", "--min-ranks", "1"},
                          with_three("[ $LOCAL_RANK = 1 ] && exit 2; exec sleep 100"));
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(there(2).size(), 3u) << "one of them cannot speak for all, and other ranks may come back";
}

TEST_F(Supervisor, PassesOverWhatSherdDoesNotTake) {
  const std::string down = (folder_ / "down.b").string();
  write_text(folder_ / "hosts", "a slots=3\nb slots=1\n");
  const std::string rank =
      cat("if [ $TRY = 0 ]; then touch ", down, "; exit 4; fi; exec ",
          joined(train({"--resume-or-start", "--set", "device.threads_per_rank=1", "--steps", "2"})));
  const std::vector<std::string> options{"--restarts", "1",      "--min-ranks",
                                         "1",          "--port", std::to_string(20000 + ::getpid() % 9000)};
  const Outcome got = run(options, rank);
  EXPECT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, AllOf(HasSubstr("the program does not take 3 ranks"), HasSubstr("over tcp(2)")));
}

}  // namespace
}  // namespace sherd::cli

// `sherd watch` at a terminal.
#include "cli/pseudo_terminal.h"
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using sherd::testing::PseudoTerminal;
using ::testing::Not;

class Watch : public Train {
 protected:
  std::string path(const char* name = "m.jsonl") const { return (folder_ / name).string(); }
  std::string command(const std::string& more = "") const {
    return cat("env LC_ALL=C NO_COLOR=1 ", joined({"watch", path()}), " ", more);
  }
  void add(int step, double loss) const {
    std::ofstream(path(), std::ios::app) << cat("{\"step\":", step, ",\"loss\":", loss, ",\"step_ms\":20}\n");
  }
  static void expect_restored(const PseudoTerminal& terminal) {
    EXPECT_TRUE(terminal.is_as_before());
    const std::string& shown = terminal.shown();
    EXPECT_EQ(count(shown, "\x1b[?1049h"), 1u);
    ASSERT_EQ(count(shown, "\x1b[?1049l"), 1u);
    ASSERT_EQ(count(shown, "\x1b[?25h"), 1u);
    EXPECT_LT(shown.find("\x1b[?1049h"), shown.find("\x1b[?1049l"));
    EXPECT_LT(shown.rfind("\x1b[?25l"), shown.find("\x1b[?25h"));
  }
};

TEST_F(Watch, RedrawsAsTheFileGrowsAndLeavesByQ) {
  add(1, 9.25);
  PseudoTerminal terminal(command());
  ASSERT_TRUE(terminal.shows("Loss  9.25")) << terminal.shown();
  EXPECT_FALSE(terminal.is_as_before());
  add(2, 8.75);
  EXPECT_TRUE(terminal.shows("step 2"));
  EXPECT_TRUE(terminal.shows("Loss  8.75"));
  terminal.type("q");
  EXPECT_EQ(terminal.end(), 0);
  expect_restored(terminal);
}

TEST_F(Watch, LeavesByCtrlCAndBySignals) {
  add(1, 9.25);
  {
    PseudoTerminal terminal(command());
    ASSERT_TRUE(terminal.shows("9.25"));
    terminal.type("\x1az\x03");  // Ctrl-Z and a letter do nothing
    EXPECT_EQ(terminal.end(), 0);
    expect_restored(terminal);
  }
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
    PseudoTerminal terminal(command());
    ASSERT_TRUE(terminal.shows("9.25"));
    terminal.send(signal);
    EXPECT_EQ(terminal.end(), 128 + signal);
    expect_restored(terminal);
  }
}

TEST_F(Watch, WaitsForAFileWithADeadline) {
  PseudoTerminal terminal(command());
  ASSERT_TRUE(terminal.shows("no file yet"));
  add(1, 9.25);
  EXPECT_TRUE(terminal.shows("9.25"));
  terminal.type("q");
  EXPECT_EQ(terminal.end(), 0);
  std::filesystem::remove(path());
  PseudoTerminal late(command("--wait 1"));
  EXPECT_EQ(late.end(), 1);
  EXPECT_THAT(late.shown(), HasSubstr("did not appear for 1.0s"));
  EXPECT_THAT(late.shown(), HasSubstr("--wait"));
  expect_restored(late);
}

TEST_F(Watch, FollowsAFileThatAResumedRunReplaces) {
  for (int step = 1; step <= 9; ++step) add(step, 5);
  PseudoTerminal terminal(command());
  ASSERT_TRUE(terminal.shows("step 9"));
  std::filesystem::rename(path(), path("old"));
  add(1, 5), add(2, 4.5);
  EXPECT_TRUE(terminal.shows("step 2"));
  EXPECT_TRUE(terminal.shows("Loss  4.50"));
  write_text(path(), "no metrics\n");
  EXPECT_EQ(terminal.end(), 1);
  EXPECT_THAT(terminal.shown(), HasSubstr("line 1 of"));
  expect_restored(terminal);
}

TEST_F(Watch, IsAsLargeAsTheTerminal) {
  for (int step = 1; step <= 50; ++step) add(step, 5);
  PseudoTerminal terminal(command(), 60, 20);
  ASSERT_TRUE(terminal.shows("step 1" + std::string(52, ' ') + "50")) << terminal.shown();
  EXPECT_THAT(terminal.shown(), HasSubstr("q leaves"));
  terminal.resize(40, 20);
  EXPECT_TRUE(terminal.shows("step 1" + std::string(32, ' ') + "50")) << terminal.shown();
  terminal.type("q");
  EXPECT_EQ(terminal.end(), 0);
}

TEST_F(Watch, HasColoursAndBrailleWhereTheTerminalHas) {
  add(1, 9), add(2, 8);
  const auto shown = [&](const std::string& environment) {
    PseudoTerminal terminal(cat("env ", environment, " ", joined({"watch", path()})));
    EXPECT_TRUE(terminal.shows("Loss"));
    EXPECT_TRUE(terminal.shows("step 1"));
    terminal.type("q");
    terminal.end();
    return terminal.shown();
  };
  const std::string rich = shown("LC_ALL=C.UTF-8 NO_COLOR=");
  EXPECT_THAT(rich, HasSubstr("│"));
  EXPECT_THAT(rich, HasSubstr("\x1b[36m"));
  const std::string poor = shown("LC_ALL=C NO_COLOR=1");
  EXPECT_THAT(poor, Not(HasSubstr("│")));
  EXPECT_THAT(poor, HasSubstr("*"));
  EXPECT_THAT(poor, Not(HasSubstr("\x1b[36m")));
}

class WatchOnce : public Train {};

TEST_F(WatchOnce, PrintsOnePicture) {
  ASSERT_EQ(sherd(train({"--metrics", (folder_ / "m").string()})).code, 0);
  const Outcome piped = shell(
      cat("env COLUMNS=70 LINES=30 LC_ALL=C.UTF-8 ", joined({"watch", "--once", (folder_ / "m").string()})));
  EXPECT_EQ(piped.code, 0) << piped.err;
  EXPECT_THAT(piped.out, HasSubstr("step 6"));
  EXPECT_THAT(piped.out, HasSubstr("Tokens per second"));
  EXPECT_THAT(piped.out, Not(HasSubstr("\x1b")));
  EXPECT_LE(count(piped.out, "\n"), 30u);
  PseudoTerminal terminal(joined({"watch", "--once", (folder_ / "m").string()}));
  EXPECT_EQ(terminal.end(), 0);
  EXPECT_THAT(terminal.shown(), Not(HasSubstr("\x1b")));
}

TEST_F(WatchOnce, SaysWhatIsWrong) {
  write_text(folder_ / "empty", "");
  const auto refuses = [&](const std::vector<std::string>& words, int code, const char* text) {
    const Outcome outcome = sherd(words);
    EXPECT_EQ(outcome.code, code);
    EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_EQ(count(outcome.err, "\n"), 1u) << outcome.err;
  };
  refuses({"watch", (folder_ / "empty").string()}, 2, "give --once");
  refuses({"watch", "--once", (folder_ / "empty").string()}, 1, "holds no step yet");
  refuses({"watch", "--once", (folder_ / "none").string()}, 1, "No such file");
  refuses({"watch"}, 2, "give one metrics file");
  refuses({"watch", folder_.path().string()}, 1, "is no file");
}

}  // namespace
}  // namespace sherd::cli

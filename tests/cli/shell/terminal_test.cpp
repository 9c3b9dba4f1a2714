// What the program shows at a terminal: the line of progress, colours, and nothing that a log would not have
// elsewhere. The real program, at a pseudo-terminal.
#include "base/terminal.h"

#include <algorithm>

#include "cli/pseudo_terminal.h"
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using sherd::testing::PseudoTerminal;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Not;

constexpr const char *hidden = "\x1b[?25l", *back = "\x1b[?25h";

/// The lines that a terminal of any width has in the end; `longest` becomes the most columns a line ever had
/// behind `from`.
std::vector<std::string> screen(const std::string& shown, std::size_t* longest = nullptr,
                                std::size_t from = 0) {
  std::vector<std::string> lines(1);
  std::size_t column = 0;
  for (std::size_t i = 0; i < shown.size(); ++i) {
    if (shown[i] == '\x1b') {
      const std::size_t end = shown.find_first_of("Khlm", i);
      if (end == std::string::npos) break;
      if (shown[end] == 'K') lines.back().resize(std::min(lines.back().size(), column));
      i = end;
    } else if (shown[i] == '\r') {
      column = 0;
    } else if (shown[i] == '\n') {
      lines.emplace_back(), column = 0;
    } else {
      if (lines.back().size() <= column) lines.back().resize(column + 1, ' ');
      lines.back()[column++] = shown[i];
      if (longest && i >= from) *longest = std::max(*longest, column);
    }
  }
  return lines;
}

class AtATerminal : public Train {
 protected:
  /// The program with some of the environment set; ASCII, whatever the locale is.
  std::string line(const std::vector<std::string>& arguments, const std::string& environment = "") const {
    return cat("env -u NO_COLOR LC_ALL=C XDG_CACHE_HOME=", folder_.path().string(), " ", environment, " ",
               joined(arguments));
  }
  std::string path(const char* name) const { return (folder_ / name).string(); }
  /// Without a trace of a bar: the cursor is there, and no line has one.
  static void expect_cleared(const std::string& shown, const std::string& title) {
    EXPECT_THAT(shown, HasSubstr(title + ": "));
    EXPECT_EQ(count(shown, hidden), count(shown, back));
    EXPECT_GT(shown.rfind(back), shown.rfind(hidden));
    for (const std::string& each : screen(shown)) EXPECT_THAT(each, Not(HasSubstr(title + ": "))) << shown;
  }
};

TEST_F(AtATerminal, TrainingShowsABarAndLogLinesAboveIt) {
  PseudoTerminal terminal(line(train({"--set", "training.save_interval=1"})), 100);
  EXPECT_EQ(terminal.end(), 0) << terminal.shown();
  const std::string& shown = terminal.shown();
  EXPECT_THAT(shown, HasSubstr("\r\x1b[K1/6 \x1b[36m[###"));
  EXPECT_THAT(shown, Not(HasSubstr("step 1/6")));
  EXPECT_EQ(count(shown, hidden), 1u);
  EXPECT_EQ(count(shown, back), 1u);
  EXPECT_EQ(count(shown, "\r\x1b[Ksherd: "), count(shown, "sherd: ")) << shown;
  std::size_t bars = 0;
  for (const std::string& each : screen(shown)) {
    EXPECT_EQ(each.find("sherd: ") == 0, each.find("sherd: ") != std::string::npos) << each;
    bars += each.starts_with("6/6 [####");
  }
  EXPECT_EQ(bars, 1u) << "the last state stays, and stands alone on its line";
}

TEST_F(AtATerminal, ALogHasPlainLinesWhateverTheTerminalIs) {
  const Outcome piped = shell(line(train(), "TERM=xterm"));
  EXPECT_EQ(piped.code, 0) << piped.err;
  for (const std::string& text : {piped.out, piped.err})
    EXPECT_THAT(text, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\r"))));
  EXPECT_THAT(piped.err, HasSubstr("\nstep 1/6  loss "));
  EXPECT_EQ(count(piped.err, "\nstep "), 6u) << piped.err;
  PseudoTerminal dumb(line(train({"--set", "training.save_dir="}), "TERM=dumb"));
  EXPECT_EQ(dumb.end(), 0);
  EXPECT_THAT(dumb.shown(), AllOf(Not(HasSubstr("\x1b")), HasSubstr("\nstep 6/6  loss ")));
}

TEST_F(AtATerminal, ColoursAreForTerminalsThatWantThem) {
  const std::vector<std::string> wrong{"trian"};
  const auto shows = [&](const std::string& environment) {
    PseudoTerminal terminal(line(wrong, environment));
    EXPECT_EQ(terminal.end(), 2);
    return terminal.shown();
  };
  const std::string coloured = "sherd: \x1b[31merror:\x1b[0m unknown command",
                    bare = "sherd: error: unknown command";
  EXPECT_THAT(shows(""), HasSubstr(coloured));
  EXPECT_THAT(shows("NO_COLOR="), HasSubstr(coloured));
  EXPECT_THAT(shows("NO_COLOR=1"), HasSubstr(bare));
  EXPECT_THAT(shows("TERM=dumb"), ::testing::StartsWith(bare));
  EXPECT_THAT(shell(line(wrong, "TERM=xterm")).err, ::testing::StartsWith(bare));
  PseudoTerminal training(line(train(), "NO_COLOR=1"));
  EXPECT_EQ(training.end(), 0);
  EXPECT_THAT(training.shown(), AllOf(HasSubstr("1/6 [##"), Not(HasSubstr("\x1b[3"))));
}

TEST_F(AtATerminal, TheBarFitsTheTerminalThatChangesAndGoesWithCtrlC) {
  PseudoTerminal terminal(line(train({"--steps", "1000000"})), 100);
  ASSERT_TRUE(terminal.shows("ETA ")) << terminal.shown();
  terminal.resize(20, 10);
  const std::size_t before = terminal.shown().size();
  for (int draws = 0; draws < 5; ++draws) ASSERT_TRUE(terminal.shows("\x1b[K")) << terminal.shown();
  const std::string until = terminal.shown();
  const std::size_t first = until.find("\r\x1b[K", before);  // which may have been under way
  const std::size_t narrow = until.find("\r\x1b[K", first + 1);
  std::size_t longest = 0;
  screen(until, &longest, narrow);
  EXPECT_LE(longest, 19u) << until.substr(narrow);
  EXPECT_GT(longest, 10u) << until.substr(narrow);
  terminal.type("\x03");
  EXPECT_EQ(terminal.end(), 130) << terminal.shown();
  const std::string& shown = terminal.shown();
  EXPECT_THAT(shown, HasSubstr("\nsherd: stopping"));
  for (const std::string& each : screen(shown))
    EXPECT_TRUE(each.find("sherd: ") == 0 || each.find("sherd: ") == std::string::npos) << each;
  EXPECT_GT(shown.rfind(back), shown.rfind(hidden));
}

TEST_F(AtATerminal, ANarrowOneHasABarToo) {
  PseudoTerminal terminal(line(train()), 20);
  EXPECT_EQ(terminal.end(), 0);
  for (const std::string& each : screen(terminal.shown()))
    if (each.starts_with("6/6")) {
      EXPECT_LE(each.size(), 19u) << each;
    }
  EXPECT_THAT(terminal.shown(), HasSubstr("\r\x1b[K1/6"));
}

TEST_F(AtATerminal, OtherWorkShowsABarThatGoes) {
  ASSERT_EQ(sherd(train()).code, 0);
  write_text(folder_ / "tasks.jsonl", R"({"context": "The 1", "choices": [" shards", " jars"], "answer": 0}
)");
  struct Work {
    const char* title;
    std::vector<std::string> arguments;
  };
  const std::vector<Work> all{
      {"encoding", {"prepare", "--input", path("text.txt"), "--output", path("again")}},
      {"exporting", {"export", path("run"), "--output", path("hf")}},
      {"importing", {"import", path("hf"), "--output", path("imported")}},
      {"evaluating", {"evaluate", "--checkpoint", path("run"), "--tasks", path("tasks.jsonl")}}};
  for (const Work& work : all) {
    PseudoTerminal terminal(line(work.arguments));
    EXPECT_EQ(terminal.end(), 0) << terminal.shown();
    expect_cleared(terminal.shown(), work.title);
  }
  for (const Work& work : all) {
    std::vector<std::string> quiet = work.arguments;
    quiet.emplace_back("--quiet");
    for (const char* made : {"again.bin", "hf", "imported"}) {
      if (work.title != std::string("importing") || made != std::string("hf"))
        std::filesystem::remove_all(folder_ / made);
    }
    PseudoTerminal terminal(line(quiet));
    EXPECT_EQ(terminal.end(), 0) << terminal.shown();
    EXPECT_THAT(terminal.shown(), AllOf(Not(HasSubstr(hidden)), Not(HasSubstr(cat(work.title, ":")))));
    EXPECT_EQ(count(terminal.shown(), "sherd: "), count(terminal.shown(), "sherd: \x1b[33mwarning:\x1b[0m "));
  }
}

/// Nobody waits for the signal in these commands: it ends them at once.
TEST_F(AtATerminal, CtrlCClearsABarThatNobodyWaitsFor) {
  std::string text = read_text(folder_ / "text.txt");
  while (text.size() < 60'000'000) text += text;
  write_text(folder_ / "long.txt", text);
  for (const int signal : {SIGINT, SIGTERM}) {
    PseudoTerminal terminal(
        line({"prepare", "--input", path("long.txt"), "--output", path("long"), "--threads", "1"}));
    ASSERT_TRUE(terminal.shows("encoding: ")) << terminal.shown();
    signal == SIGINT ? terminal.type("\x03") : terminal.send(signal);
    EXPECT_EQ(terminal.end(), -signal);
    expect_cleared(terminal.shown(), "encoding");
  }
}

/// The metrics file becomes larger than files may be.
TEST_F(AtATerminal, AnErrorStandsOnALineOfItsOwn) {
  PseudoTerminal terminal(
      line(train({"--steps", "1000000", "--set", "training.save_dir=", "--metrics", path("m.jsonl")}),
           "prlimit --fsize=20000"),
      60);
  EXPECT_EQ(terminal.end(), 1) << terminal.shown();
  EXPECT_THAT(terminal.shown(), HasSubstr("\r\x1b[K1/1000000"));
  const std::vector<std::string> lines = screen(terminal.shown());
  EXPECT_EQ(std::count_if(lines.begin(), lines.end(),
                          [](const std::string& each) { return each.starts_with("sherd: error: "); }),
            1)
      << terminal.shown();
  EXPECT_EQ(count(terminal.shown(), back), 1u);
}

}  // namespace
}  // namespace sherd::cli

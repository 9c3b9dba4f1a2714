#include "engine/report/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <string>

#include "base/log.h"
#include "engine/stop_signals.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using sherd::testing::read_text;
using sherd::testing::TempFolder;
using ::testing::HasSubstr;
using ::testing::Not;

ProgressState example() {
  return {.step = 120,
          .total_steps = 400,
          .loss = 4.321,
          .val_loss = 4.5,
          .metrics = {},
          .lr = 3e-4,
          .lrs = {3e-4},
          .grad_norm = 1.25,
          .per_s = 12345,
          .mfu = 0.314,
          .seconds_left = 151};
}

int columns(const std::string& text) {
  int count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return count;
}

TEST(FormatBar, ShowsEverythingThatFits) {
  EXPECT_EQ(
      format_bar(example(), 100, {}),
      "120/400 [########....................]  30%  loss 4.3210  val 4.5000  12.3k tok/s  MFU 31%  ETA 2:31");
  EXPECT_THAT(format_bar(example(), 120, {.unicode = true}), HasSubstr("████████████░"));
}

TEST(FormatBar, NeverPassesTheWidthAndKeepsTheLossLongest) {
  for (int width = 0; width <= 200; ++width)
    for (const bool unicode : {false, true}) {
      const std::string line = format_bar(example(), width, {.unicode = unicode});
      EXPECT_LE(columns(line), width) << line;
      if (width >= 30) {
        EXPECT_THAT(line, HasSubstr("loss 4.3210")) << width;
      }
      if (width >= 70) {
        EXPECT_THAT(line, HasSubstr(unicode ? "░" : "[#")) << width;
      }
    }
}

TEST(FormatBar, SurvivesOddStates) {
  const auto bar = [](std::int64_t step, std::int64_t total) {
    ProgressState state;
    state.step = step;
    state.total_steps = total;
    return format_bar(state, 80, {});
  };
  EXPECT_THAT(bar(5, 0), HasSubstr("0%"));
  EXPECT_THAT(bar(9, 5), HasSubstr("100%"));
  EXPECT_THAT(bar(399, 400), HasSubstr(" 99%"));  // not done yet
}

TEST(FormatBar, OnlyTheBarHasColour) {
  EXPECT_THAT(format_bar(example(), 100, {.colour = true}), HasSubstr("120/400 \x1b[36m[####"));
  EXPECT_EQ(format_bar(example(), 20, {.colour = true}), format_bar(example(), 20, {}));
}

TEST(FormatWork, TellsWhatIsDoneAndWhatIsLeft) {
  WorkState state{
      .title = "evaluating", .done = 50, .total = 200, .unit = "examples", .more = {}, .seconds = 10};
  const std::string line = format_work(state, 100, {});
  EXPECT_THAT(line, ::testing::StartsWith("evaluating: 50 of 200 examples [####"));
  EXPECT_THAT(line, HasSubstr("]  25%  "));
  EXPECT_THAT(line, HasSubstr("ETA 30.0s"));
  for (int width = 1; width < 100; ++width)
    EXPECT_LE(columns(format_work(state, width, {.unicode = true})), width);
  EXPECT_EQ(format_work(state, 12, {}), "evaluating: ");
  state.total = 0, state.unit = "", state.done = 3 << 20, state.seconds = 0, state.more = "7 tokens";
  const std::string unknown = format_work(state, 100, {});
  EXPECT_THAT(unknown, ::testing::StartsWith("evaluating: 3"));
  EXPECT_THAT(unknown, ::testing::EndsWith(" MiB  7 tokens")) << "no share of what is not known";
}

TEST(FormatPlain, HasEveryFigure) {
  EXPECT_EQ(format_plain(example()),
            "step 120/400  loss 4.32100  val_loss 4.50000  lr 3.000e-04  grad_norm 1.250  12.3k tok/s  mfu "
            "0.314  eta 2:31");
  ProgressState state = example();
  state.lrs = {3e-4, 0.5};
  state.title = "verify: ";
  EXPECT_THAT(format_plain(state), ::testing::StartsWith("verify: step "));
  EXPECT_THAT(format_bar(state, 100, {}), ::testing::StartsWith("verify: "));
  EXPECT_THAT(format_plain(state), HasSubstr("  lr 3.000e-04  lrs 3.000e-04,5.000e-01  grad_norm"));
}

TEST(Progress, WritesPlainLinesToLogs) {
  TempFolder folder;
  const int file = ::open((folder / "log").c_str(), O_CREAT | O_WRONLY, 0600);
  {
    Progress progress(file, 10, 4);
    EXPECT_FALSE(progress.on_terminal());
    for (int step = 1; step <= 10; ++step) {
      ProgressState state = example();
      state.step = step;
      progress.update(state, step == 3);
    }
  }
  ::close(file);
  const std::string log = read_text(folder / "log");
  EXPECT_THAT(log, Not(HasSubstr("\x1b")));
  EXPECT_THAT(log, Not(HasSubstr("\r")));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 4);  // steps 3 (evaluated), 4, 8, 10 (last)
  EXPECT_THAT(log, HasSubstr("step 3/10  loss 4.32100  val_loss 4.50000"));
  EXPECT_THAT(log, HasSubstr("step 4/10  loss 4.32100  lr"));
}

/// Runs `body(fd)` in a child on a pseudo-terminal 60 columns wide, and returns what it showed.
template <class Body>
std::string on_terminal(int& status, Body body) {
  winsize size{};
  size.ws_row = 24, size.ws_col = 60;
  int master = -1;
  const pid_t child = ::forkpty(&master, nullptr, nullptr, &size);
  if (child == 0) {
    ::setenv("TERM", "xterm", 1);
    ::setenv("LC_ALL", "C", 1);
    body(STDOUT_FILENO);
    ::_exit(0);
  }
  std::string shown;
  char buffer[4096];
  for (ssize_t got; (got = ::read(master, buffer, sizeof buffer)) > 0;)
    shown.append(buffer, static_cast<std::size_t>(got));
  ::waitpid(child, &status, 0);
  ::close(master);
  return shown;
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

TEST(Progress, RedrawsOneLineOnATerminal) {
  int status = 0;
  const std::string shown = on_terminal(status, [](int terminal) {
    Progress progress(terminal, 1000, 1);
    for (int step = 1; step <= 1000; ++step) {
      ProgressState state = example();
      state.step = step;
      progress.update(state);
      if (step == 500) log_info("halfway");
    }
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(count_of(shown, "\x1b[?25l"), 1);
  EXPECT_EQ(count_of(shown, "\x1b[?25h"), 1);
  EXPECT_EQ(count_of(shown, "\r\x1b[Ksherd: halfway\r\n"), 1);
  EXPECT_THAT(shown, HasSubstr("1000/1000"));
  EXPECT_LE(count_of(shown, "\x1b[K"), 50)
      << "a thousand quick steps were drawn more than ten times a second";
  const std::size_t last = shown.rfind("\x1b[K") + 3;
  EXPECT_LT(shown.find("\r\n", last) - last, 60u);
}

TEST(WorkBar, IsWipedWhenItGoesAndBeforeASignal) {
  int status = 0;
  std::string shown = on_terminal(status, [](int terminal) {
    WorkBar bar(terminal);
    for (int i = 0; i < 1000; ++i) bar.show({.title = "importing", .done = 1.0 * i, .total = 1000});
  });
  EXPECT_THAT(shown, HasSubstr("importing: 0 "));
  EXPECT_THAT(shown, ::testing::EndsWith("\r\x1b[K\x1b[?25h"));
  EXPECT_LE(count_of(shown, "importing"), 20) << "drawn more than ten times a second";
  shown = on_terminal(status, [](int terminal) {
    WorkBar bar(terminal);
    bar.show({.title = "importing", .done = 1, .total = 2});
    std::raise(SIGINT);
  });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
  EXPECT_THAT(shown, ::testing::EndsWith("\r\x1b[K\x1b[?25h"));
}

TEST(WorkBar, IsNotShownWhereNoProgressIs) {
  int status = 0;
  const std::string shown = on_terminal(status, [](int terminal) {
    set_shows_progress(false);
    WorkBar(terminal).show({.title = "importing", .done = 1, .total = 2});
    Progress progress(terminal, 10, 1);
    progress.update(example());
    log_warning("w");
  });
  EXPECT_THAT(shown, Not(HasSubstr("importing")));
  EXPECT_THAT(shown, Not(HasSubstr("120/400")));
  EXPECT_THAT(shown, HasSubstr("warning:"));
}

TEST(Progress, ASignalBringsTheCursorBack) {
  int status = 0;
  const std::string shown = on_terminal(status, [](int terminal) {
    Progress progress(terminal, 10, 1);
    progress.update(example());
    std::raise(SIGTERM);
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  EXPECT_GT(shown.rfind("\x1b[?25h"), shown.rfind("\x1b[?25l"));
  EXPECT_EQ(count_of(shown, "\x1b[?25h"), 1);
}

/// As the second of a kind does, which nobody waits for.
TEST(Progress, ASignalThatEndsARunAtOnceBringsTheCursorBack) {
  int status = 0;
  const std::string shown = on_terminal(status, [](int terminal) {
    const StopSignals signals;
    Progress progress(terminal, 10, 1);
    progress.update(example());
    end_by_signal(SIGTERM);
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  EXPECT_GT(shown.rfind("\x1b[?25h"), shown.rfind("\x1b[?25l"));
}

TEST(Progress, LeavesHandlersOfOthersAlone) {
  int status = 0;
  on_terminal(status, [](int terminal) {
    std::signal(SIGTERM, SIG_IGN);
    Progress progress(terminal, 10, 1);
    progress.update(example());
    std::raise(SIGTERM);
    progress.finish();
    std::raise(SIGTERM);
    ::_exit(7);
  });
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace sherd::engine

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/metrics/metrics_file.h"
#include "cli/metrics/screen.h"
#include "cli/metrics/text_picture.h"
#include "cli/program.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

/// "step 12  1.5M tokens  last step 3 s ago  metrics.jsonl"
std::string heading_of(const MetricsFile& file, const std::string& state) {
  const Metrics& metrics = file.metrics();
  std::string out;
  if (!metrics.empty()) out += cat("step ", metrics.last_step(), "  ");
  if (const auto& tokens = metrics.of("tokens"); !tokens.empty() && tokens.back().value > 0)
    out += cat(engine::human_count(tokens.back().value), " tokens  ");
  return out + state + file.path().filename().string();
}

void print_once(const fs::path& path) {
  const MetricsFile file = read_metrics(path);
  if (file.metrics().empty())
    fail(ErrorKind::data, "'", path.string(),
         "' holds no step yet: look again when the run has done one, or leave --once away to wait for it");
  const ScreenSize size = screen_size(STDOUT_FILENO);
  // A line less than the terminal has, for the shell's prompt.
  for (const std::string& line : overview_as_text(file.metrics(), heading_of(file, ""), size.width,
                                                  size.height - 1, style_of_environment(-1)))
    std::printf("%s\n", line.c_str());
}

/// Shows a file in the terminal, until a key, a signal or the deadline ends that.
class Watch {
 public:
  Watch(const fs::path& path, double deadline)
      : file_(path), deadline_(deadline), style_(style_of_environment(STDOUT_FILENO)) {}

  void run() {
    const Screen screen;
    for (;;) {
      bool news = file_.poll();
      if (news && file_.exists()) changed_ = Clock::now();
      if (file_.exists()) seen_ = Clock::now();
      require_in_time();
      const ScreenSize size = screen_size(STDOUT_FILENO);
      news |= size.width != size_.width || size.height != size_.height;
      // The age below is of whole seconds.
      if (news || seconds_since(drawn_) >= 1) show(screen, size);
      const char key = screen.key(file_.metrics().last_step() > 100'000 ? 1000 : 200);
      if (Screen::signal() != 0) throw Finding{stopped_by(Screen::signal())};
      if (key == 'q' || key == 'Q' || key == '\x03') return;
    }
  }

 private:
  void require_in_time() const {
    if (file_.exists() || seconds_since(seen_) < deadline_) return;
    fail(ErrorKind::io, "the metrics file '", file_.path().string(), "' ",
         file_.metrics().empty() ? "did not appear" : "has been gone", " for ",
         engine::human_seconds(deadline_), ": start `sherd train --metrics ", file_.path().string(),
         "`, or give --wait more seconds");
  }

  std::string state() const {
    if (!file_.exists())
      return cat("no file yet, ", engine::human_seconds(seconds_since(seen_)), " of ",
                 engine::human_seconds(deadline_));
    if (file_.metrics().empty()) return "no step yet";
    return cat("last step ", static_cast<std::int64_t>(seconds_since(changed_)), " s ago");
  }

  void show(const Screen& screen, const ScreenSize& size) {
    const std::string heading = heading_of(file_, state() + "  q leaves  ");
    screen.show(overview_as_text(file_.metrics(), heading, size.width, size.height, style_));
    size_ = size, drawn_ = Clock::now();
  }

  MetricsFile file_;
  double deadline_;
  TextStyle style_;
  ScreenSize size_{0, 0};
  Clock::time_point seen_ = Clock::now(), changed_ = seen_, drawn_{};
};

}  // namespace

CommandLine watch_line() {
  CommandLine line(
      "watch",
      "Draws losses, rates, gradient norm and memory of a run in the terminal while it goes on: what "
      "`sherd train --metrics` writes. q or Ctrl-C leaves.",
      "METRICS.jsonl [--once] [--wait S]");
  line.list("metrics", "METRICS.jsonl", "what `sherd train --metrics` writes")
      .flag("once", "print one picture without escape codes, and end")
      .value("wait", "S", "seconds to wait for a file that is not there", "60")
      .rest_to("metrics");
  return line;
}

void watch_command(const CommandLine& line) {
  const std::vector<std::string> given = line.all("metrics");
  if (given.size() != 1) throw UsageError("give one metrics file. See 'sherd watch --help'");
  const std::int64_t deadline = line.integer("wait", 0);
  if (line.has("once")) return print_once(given[0]);
  if (std::error_code error; fs::exists(given[0], error) && !fs::is_regular_file(given[0], error))
    fail(ErrorKind::io, "'", excerpt(given[0]),
         "' is no file: name the one that `sherd train --metrics` writes");
  Watch(given[0], static_cast<double>(deadline)).run();
}

}  // namespace sherd::cli

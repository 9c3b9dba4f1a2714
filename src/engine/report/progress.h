#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/terminal.h"

namespace sherd::engine {

/// The state of a run that the bar and the plain lines show after an optimizer step.
struct ProgressState {
  std::string title{};                     ///< begins its lines: "verify: "; ASCII, empty for training
  std::int64_t step = 0, total_steps = 0;  ///< done, and to do in all
  double loss = 0;
  std::optional<double> val_loss;         ///< the latest
  std::map<std::string, double> metrics;  ///< the same evaluation's; plain lines have them
  double lr = 0;
  std::vector<double> lrs;  ///< all parameter groups'; plain lines have them where there are several
  double grad_norm = 0;
  double per_s = 0;  ///< in `unit`
  std::string unit = "tok/s";
  std::optional<double> mfu;  ///< 0…1
  double seconds_left = -1;   ///< negative: unknown
};

/// How a bar is drawn: with block characters, and with colour.
struct BarStyle {
  bool unicode = false, colour = false;

  /// The style that the locale and the terminal at `descriptor` can show.
  static BarStyle of(int descriptor);
};

/// One line of at most `width` columns: counter, bar, share, loss, validation loss, tokens/s, MFU, time left.
/// When it does not fit, the bar shrinks, then the least important figures go.
std::string format_bar(const ProgressState& state, int width, BarStyle style);

/// The line that goes into logs, without a newline and of any width.
std::string format_plain(const ProgressState& state);

/// Shows training's progress on a file descriptor: on a terminal a StatusLine; elsewhere plain lines, every
/// `every` steps and for steps with a validation loss. Nothing where the log keeps no information (--quiet).
/// Only rank 0 has one. Used by one thread.
class Progress {
 public:
  Progress(int descriptor, std::int64_t total_steps, std::int64_t every);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// After each step. Fills in seconds_left from the steps' recent pace when it is negative. `evaluated`
  /// marks a step whose val_loss is new.
  void update(ProgressState state, bool evaluated = false);
  /// Draws the last state and moves on to the next line. Later updates start a new bar.
  void finish();
  bool on_terminal() const { return terminal_; }

 private:
  using Clock = std::chrono::steady_clock;
  double seconds_left(std::int64_t step);

  int descriptor_;
  std::int64_t total_steps_, every_;
  bool terminal_;
  BarStyle style_;
  StatusLine line_;
  ProgressState state_;
  Clock::time_point last_step_time_{};
  std::int64_t last_step_ = -1;
  double seconds_per_step_ = 0;  ///< smoothed; 0: unknown
};

/// How far work is that is no training: bytes, or things of a kind.
struct WorkState {
  std::string title;           ///< "importing"
  double done = 0, total = 0;  ///< total 0: unknown
  std::string unit = {};       ///< "examples"; empty: bytes
  std::string more = {};       ///< another figure
  double seconds = 0;          ///< since it began: for the rate and the time left
};

/// A line of it, as format_bar()'s.
std::string format_work(const WorkState& state, int width, BarStyle style);

/// Shows such work as a StatusLine.
class WorkBar {
 public:
  explicit WorkBar(int descriptor) : style_(BarStyle::of(descriptor)), line_(descriptor) {}
  /// Fills in `seconds`. Another title begins another piece of work.
  void show(WorkState state);
  void clear() { line_.clear(); }

 private:
  BarStyle style_;
  StatusLine line_;
  std::string title_;
  std::chrono::steady_clock::time_point begun_{};
};

}  // namespace sherd::engine

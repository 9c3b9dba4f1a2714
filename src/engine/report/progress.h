#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

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

/// One line of at most `width` columns: counter, bar, share, loss, validation loss, tokens/s, MFU, time left.
/// When it does not fit, the bar shrinks, then the least important figures go. `unicode` draws the bar with
/// block characters.
std::string format_bar(const ProgressState& state, int width, bool unicode);

/// The line that goes into logs, without a newline and of any width.
std::string format_plain(const ProgressState& state);

/// Shows training's progress on a file descriptor: on a terminal one line redrawn in place, at most ten times
/// a second, with the cursor hidden; elsewhere plain lines, every `every` steps and for steps with a
/// validation loss. Only rank 0 has one. Used by one thread. The cursor comes back when the object goes, and
/// also when a signal that nobody handles (SIGINT, SIGTERM, SIGHUP, SIGQUIT) ends the program.
class Progress {
 public:
  Progress(int descriptor, std::int64_t total_steps, std::int64_t every);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// After each step. Fills in seconds_left from the steps' recent pace when it is negative. `evaluated`
  /// marks a step whose val_loss is new.
  void update(ProgressState state, bool evaluated = false);
  /// A line that stays, above the bar.
  void message(const std::string& line);
  /// Draws the last state and moves on to the next line. Later updates start a new bar.
  void finish();
  bool on_terminal() const { return terminal_; }

 private:
  using Clock = std::chrono::steady_clock;
  void draw();
  void put(const std::string& text);
  double seconds_left(std::int64_t step);

  int descriptor_;
  std::int64_t total_steps_, every_;
  bool terminal_, unicode_;
  bool drawn_ = false;  ///< a bar stands on the cursor's line
  ProgressState state_;
  Clock::time_point last_draw_{};
  Clock::time_point last_step_time_{};
  std::int64_t last_step_ = -1;
  double seconds_per_step_ = 0;  ///< smoothed; 0: unknown
};

}  // namespace sherd::engine

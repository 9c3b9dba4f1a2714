#pragma once

#include <chrono>
#include <string>

namespace sherd::engine {

/// One line that is overwritten in place on a terminal, at most ten times a second; nothing at all elsewhere.
/// For one thread. Gone when the object goes.
class StatusLine {
 public:
  explicit StatusLine(int descriptor);
  ~StatusLine() { clear(); }
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  /// Shows `text`, ASCII, cut to the terminal's width.
  void show(std::string text);
  void clear();

 private:
  int descriptor_;
  bool terminal_, shown_ = false;
  std::chrono::steady_clock::time_point last_{};
};

/// True for a terminal that understands cursor movements.
bool is_terminal(int descriptor);
/// Its columns; 80 when unknown.
int terminal_width(int descriptor);
/// Writes all of `text`; a terminal or pipe that is gone is no error.
void write_terminal(int descriptor, const std::string& text);

/// Hides the cursor of a terminal when it is written to it. From now on signals that nobody handles (stop
/// signals, SIGQUIT) bring it back before they end the program. One terminal at a time.
std::string hide_cursor(int terminal);
/// Brings it back when it is written; signals are as they were then.
std::string show_cursor();

/// Ends the program by `signal`, as where nobody handles it, once a hidden cursor is back. Signal handlers
/// may call it.
void end_by_signal(int signal);

}  // namespace sherd::engine

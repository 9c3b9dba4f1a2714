#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace sherd {

/// True for a terminal that understands cursor movements.
bool is_terminal(int descriptor);
/// True for such a terminal, unless the environment's NO_COLOR is set and not empty (https://no-color.org).
bool shows_colours(int descriptor);
/// Whether texts may have other characters than ASCII, by LC_ALL, LC_CTYPE or LANG: the first that is set.
bool locale_is_utf8();
/// The columns of a terminal now; 80 when unknown.
int terminal_width(int descriptor);
/// Writes all of `text`; a terminal or pipe that is gone is no error.
void write_terminal(int descriptor, const std::string& text);

/// Colours of the terminal's own palette.
inline constexpr const char *red = "\x1b[31m", *yellow = "\x1b[33m", *cyan = "\x1b[36m", *plain = "\x1b[0m";
/// Wipes the line that the cursor is on.
inline constexpr const char* clear_line = "\r\x1b[K";

/// Whether progress is shown at all: unless --quiet says otherwise. Process-wide, whatever the log keeps. The
/// first returns what was so before.
bool set_shows_progress(bool shown);
bool shows_progress();

/// One line that is overwritten in place on a terminal, at most ten times a second, with the cursor hidden;
/// nothing at all elsewhere, and where no progress is shown. For one thread, one line at a time. The line is
/// wiped and the cursor back when the object goes, and before a signal that nobody handles (stop signals,
/// SIGQUIT) ends the program. Lines of the log wipe it; it comes back with the next one shown.
class StatusLine {
 public:
  explicit StatusLine(int descriptor);
  ~StatusLine() { clear(); }
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  /// Shows what `text` makes for so many columns, unless the last one came less than a tenth of a second ago.
  void show(const std::function<std::string(int columns)>& text);
  /// Shows ASCII text, cut to the terminal's width.
  void show(std::string text);
  /// Shows the same as last time, or what is newer, and leaves it: the cursor moves on to the next line.
  void leave(const std::function<std::string(int columns)>& text);
  void clear();

 private:
  void draw(const std::function<std::string(int columns)>& text);

  int descriptor_;
  bool active_, shown_ = false;
  std::chrono::steady_clock::time_point last_{};
};

/// Wipes a status line that is shown, so that something else may be written. Signal handlers may call it.
void wipe_status_line();
/// Ends the program by `signal`, as where nobody handles it, once a status line is gone. Signal handlers may
/// call it.
void end_by_signal(int signal);

}  // namespace sherd

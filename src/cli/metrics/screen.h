#pragma once

#include <termios.h>

#include <string>
#include <vector>

namespace sherd::cli {

struct ScreenSize {
  int width = 80, height = 24;
};
/// The terminal's size; where there is none, what COLUMNS and LINES say, else 80 × 24.
ScreenSize screen_size(int descriptor);

/// A terminal's second screen, which is drawn on while the object lives. Then, also where an error or a
/// signal ends the program, the terminal is as it was. One at a time.
class Screen {
 public:
  /// Throws Error{usage} where standard output is no terminal that moves its cursor.
  Screen();
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  /// Shows these lines in the place of what was shown.
  void show(const std::vector<std::string>& lines) const;
  /// Waits for a key, a signal or `milliseconds`, whichever comes first. 0: no key. Ctrl-C is '\x03'; where
  /// the terminal has gone, that too.
  char key(int milliseconds) const;
  /// The signal that asked the program to end since the screen was made; 0: none.
  static int signal();

 private:
  bool has_keys_ = false;
  termios before_{};
};

}  // namespace sherd::cli

#pragma once

namespace sherd::engine {

/// While one lives, SIGINT, SIGTERM and SIGHUP ask the program to stop instead of ending it, each once: a
/// second one of a kind ends it as usual, unless it comes within a second, as from a terminal and a launcher
/// that both deliver one. Signals that the program was started to ignore (nohup, background jobs of shells)
/// stay ignored. Several may live at once, one for each rank; the last to go puts back what was there. Safe
/// from any thread.
class StopSignals {
 public:
  /// `message` is told on standard error when one comes; it must outlive all.
  explicit StopSignals(const char* message = "");
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came since the first of them was made; 0 for none.
  static int received();
};

}  // namespace sherd::engine

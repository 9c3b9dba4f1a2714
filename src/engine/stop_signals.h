#pragma once

#include <functional>
#include <optional>

#include "base/threads.h"

namespace sherd::engine {

/// While one lives, SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the program to stop instead of ending it, each
/// once: a second one of a kind ends it as usual, unless it comes within a second, as from a terminal and a
/// launcher that both deliver one. Signals that the program was started to ignore (nohup, background jobs of
/// shells) stay ignored; those that the first one's thread blocks, and a SIGUSR1 or SIGUSR2 that has a
/// handler, stay the program's. SIGUSR2 stops nothing: it is answered.
///
/// Several may live at once, one for each rank, made and destroyed by its thread, in which they block these
/// signals; the last to go puts back what was there. One thread of theirs waits for the signals, so that none
/// comes to a thread that computes. Where one comes to a thread that they know nothing of, a handler takes
/// it, on the thread's alternate stack where it has one.
class StopSignals {
 public:
  /// `message` is told on standard error when one comes; it must outlive all. `answer` is called for each
  /// SIGUSR2, on a thread that does not compute, while the ranks go on or hang; it must not throw.
  explicit StopSignals(const char* message = "", std::function<void()> answer = nullptr);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came since the first of them was made; 0 for none. Counts what the calling thread has
  /// raised, too.
  static int received();

  /// For the start of main(): lets a SIGUSR2 that comes while no StopSignals lives do nothing, rather than
  /// end the program, unless it is ignored or has a handler. Programs that are started from here have its
  /// default.
  static void let_inquiries_pass();

  /// While one lives, the calling thread's signals are not blocked: for functions of a program that uses
  /// Sherd, since programs that they start inherit what is.
  class Lifted {
   public:
    Lifted();

   private:
    SignalMask mask_;
  };

 private:
  std::optional<SignalMask> mask_;
};

}  // namespace sherd::engine

#pragma once

#include <array>
#include <csignal>
#include <utility>

// Stacks of threads, and signals that come while they compute. A product of some library may keep its stack
// pointer in other memory while it runs (oneDNN's for AVX2 in its workspace); a signal that comes then
// overwrites that memory, unless its handler runs on an alternate stack: its SA_ONSTACK, the thread's
// sigaltstack(). So every thread that computes has one, and signals that ask to stop go to threads that do
// not compute (engine/stop_signals.h).
namespace sherd {

/// The signals that ask a run to stop. Slurm sends SIGUSR1 where it is told so (`--signal=USR1@60`).
inline constexpr std::array<int, 4> stop_signals{SIGINT, SIGTERM, SIGHUP, SIGUSR1};
/// The signal that asks a run where it stands; the run goes on.
inline constexpr int inquiry_signal = SIGUSR2;
/// All these as a set.
sigset_t stop_signal_set();

/// Blocks or unblocks these signals in the calling thread while it lives; for one thread.
class SignalMask {
 public:
  /// `how` is SIG_BLOCK or SIG_UNBLOCK; those of `signals` count that are in stop_signal_set().
  SignalMask(int how, const sigset_t& signals);
  ~SignalMask();
  SignalMask(const SignalMask&) = delete;
  SignalMask& operator=(const SignalMask&) = delete;

 private:
  int back_;
  sigset_t changed_{};
};

/// Gives the calling thread an alternate stack until it ends, unless it has one (a sanitizer's, a runtime's).
/// For each thread that computes. A thread for whose stack no memory is left goes on without.
void ensure_signal_stack();

/// Begins a thread that is Sherd's own: none of these signals comes to it, and it has an alternate stack.
/// Callers' functions do not run there, which may start programs: those inherit what is blocked.
void begin_own_thread();

/// `body` for a std::thread of Sherd's own, which begins with begin_own_thread().
template <class Body>
auto own_thread(Body body) {
  return [body = std::move(body)]() mutable {
    begin_own_thread();
    body();
  };
}

/// Warns, once in a process for each signal, of handlers that may run at any moment and lack SA_ONSTACK,
/// which a library or the program has set.
void warn_of_handlers_on_threads_stacks();

/// Makes sure of enough stack for Sherd's work whatever `ulimit -s` says: raises the calling process's limit
/// as far as it may, and what threads get that are started from now on. Throws Error{memory} where the main
/// thread is left with too little.
void require_stack();

}  // namespace sherd

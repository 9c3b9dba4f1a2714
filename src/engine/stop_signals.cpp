#include "engine/stop_signals.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/terminal.h"

namespace sherd::engine {
namespace {

// Signals have no owner but the process: variables that belong to no object.
std::atomic<int> came{0};
std::atomic<const char*> told{""};
std::array<std::atomic<std::int64_t>, stop_signals.size()>
    first_came{};  // by kind, in milliseconds; 0: not yet
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<const char*>::is_always_lock_free &&
              std::atomic<std::int64_t>::is_always_lock_free);

/// A terminal and a launcher may both deliver what was asked for once.
constexpr std::int64_t one_request_ms = 1000;

std::int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);  // which signal handlers may call, unlike std::chrono's by its word
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000 + 1;
}

std::mutex inquiry_mutex;
std::vector<std::pair<const StopSignals*, std::function<void()>>>& inquiries =
    *new std::vector<std::pair<const StopSignals*, std::function<void()>>>;  // guarded by inquiry_mutex
std::atomic<pid_t> waiting_thread{0};

void answer_inquiry() {
  const std::lock_guard lock(inquiry_mutex);
  for (const auto& [asked, answer] : inquiries) answer();
}

/// On whatever thread got the signal, also inside of a handler.
void take_stop(int signal) {
  std::size_t kind = 0;
  while (stop_signals[kind] != signal) ++kind;
  std::int64_t first = 0;
  const std::int64_t now = now_ms();
  if (first_came[kind].compare_exchange_strong(first, now)) {
    came = signal;
    const char* message = told;
    if (*message) wipe_status_line();
    [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, message, std::strlen(message));
  } else if (now - first >= one_request_ms) {
    end_by_signal(signal);
  }
}

/// On a thread that may do all, outside of handlers.
void take(int signal) {
  signal == inquiry_signal ? answer_inquiry() : take_stop(signal);
}

extern "C" void on_stop_signal(int signal) {
  const int error = errno;  // of whatever was interrupted
  if (signal == inquiry_signal)
    ::syscall(SYS_tgkill, ::getpid(), waiting_thread.load(), signal);  // a handler may not answer
  else
    take_stop(signal);
  errno = error;
}

std::mutex mutex;  // guards what follows, but for reads while one lives
std::atomic<int> living = 0;
sigset_t taken{};
constexpr std::array all_taken{SIGINT, SIGTERM, SIGHUP, SIGUSR1, inquiry_signal};
static_assert(std::equal(stop_signals.begin(), stop_signals.end(), all_taken.begin()));
std::array<struct sigaction, all_taken.size()> before{};
std::thread& waiting = *new std::thread;  // stays, since exit() may come while it waits
std::atomic<bool> leaving = false;

/// The signals that are pending for the process and for the calling thread. Inquiries are answered once
/// together: an answer takes longer than some take to ask again.
void take_pending() {
  if (living == 0) return;
  const timespec at_once{};
  bool asked = false;
  for (int signal; (signal = ::sigtimedwait(&taken, nullptr, &at_once)) > 0;)
    signal == inquiry_signal ? static_cast<void>(asked = true) : take_stop(signal);
  if (asked) answer_inquiry();
}

void wait_for_signals() {
  waiting_thread = ::gettid();
  for (;;) {
    siginfo_t info{};
    const int signal = ::sigwaitinfo(&taken, &info);
    const bool by_leave = info.si_code == SI_QUEUE && info.si_value.sival_ptr == &leaving;
    if (signal > 0 && !by_leave) take(signal);  // -1: another signal's handler ran
    if (leaving) return;
  }
}

/// Ends the thread that waits. What comes meanwhile stays pending.
void leave() {
  if (!waiting.joinable()) return;
  leaving = true;
  int any = 0;
  for (const int signal : all_taken)
    if (::sigismember(&taken, signal) == 1) any = signal;
  ::pthread_sigqueue(waiting.native_handle(), any, {.sival_ptr = &leaving});
  waiting.join();
  leaving = false;
}

/// A child of fork() has one thread, and what it becomes is to be stopped as usual. Whoever forks holds the
/// mutex, which another thread might else hold in the child for ever.
void before_fork() {
  mutex.lock();
}
void in_parent() {
  mutex.unlock();
}
void in_child() {
  mutex.unlock();
  if (living == 0) return;
  new (&waiting) std::thread();
  ::pthread_sigmask(SIG_UNBLOCK, &taken, nullptr);
}

/// A handler, not SIG_IGN, which programs started from here would inherit.
extern "C" void on_early_inquiry(int) {}

bool is_taken(int signal, const struct sigaction& now, const sigset_t& blocked) {
  const bool handled =
      (now.sa_flags & SA_SIGINFO) || (now.sa_handler != SIG_DFL && now.sa_handler != on_early_inquiry);
  const bool ignored = !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_IGN;
  const bool for_programs = signal == SIGUSR1 || signal == inquiry_signal;
  return !ignored && !(for_programs && handled) && ::sigismember(&blocked, signal) == 0;
}

void begin(const char* message) {
  [[maybe_unused]] static const int registered = ::pthread_atfork(before_fork, in_parent, in_child);
  came = 0;
  for (auto& first : first_came) first = 0;
  told = logs(LogLevel::info) ? message : "";
  sigset_t blocked;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  ::sigemptyset(&taken);
  for (std::size_t i = 0; i < all_taken.size(); ++i) {
    ::sigaction(all_taken[i], nullptr, &before[i]);
    if (is_taken(all_taken[i], before[i], blocked)) ::sigaddset(&taken, all_taken[i]);
  }
  if (::sigisemptyset(&taken)) return;
  {
    const SignalMask inherited(SIG_BLOCK, taken);
    waiting = std::thread(own_thread(wait_for_signals));
  }
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_ONSTACK | SA_RESTART;
  action.sa_mask = taken;
  for (const int signal : all_taken)
    if (::sigismember(&taken, signal) == 1) ::sigaction(signal, &action, nullptr);
}

void end() {
  leave();
  take_pending();
  for (std::size_t i = 0; i < all_taken.size(); ++i)
    if (::sigismember(&taken, all_taken[i]) == 1) ::sigaction(all_taken[i], &before[i], nullptr);
}

}  // namespace

StopSignals::StopSignals(const char* message, std::function<void()> answer) {
  ensure_signal_stack();
  if (answer) {
    const std::lock_guard lock(inquiry_mutex);
    inquiries.emplace_back(this, std::move(answer));
  }
  const std::lock_guard lock(mutex);
  if (living == 0) begin(message);
  ++living;
  mask_.emplace(SIG_BLOCK, taken);
}

StopSignals::~StopSignals() {
  {
    const std::lock_guard lock(inquiry_mutex);  // an answer under way ends first
    std::erase_if(inquiries, [this](const auto& each) { return each.first == this; });
  }
  const std::lock_guard lock(mutex);
  if (living == 1) end();
  --living;
}

int StopSignals::received() {
  take_pending();
  return came.load();
}

void StopSignals::let_inquiries_pass() {
  struct sigaction action {};
  ::sigaction(inquiry_signal, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) || action.sa_handler != SIG_DFL) return;
  action.sa_handler = on_early_inquiry;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  ::sigaction(inquiry_signal, &action, nullptr);
}

StopSignals::Lifted::Lifted() : mask_(SIG_UNBLOCK, living > 0 ? taken : sigset_t{}) {}

}  // namespace sherd::engine

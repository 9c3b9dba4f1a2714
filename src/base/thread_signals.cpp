#include "base/thread_signals.h"

#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/log.h"

namespace sherd {
namespace {

/// What handlers get beside what the system puts there of a thread's registers: profilers walk stacks.
constexpr std::size_t room_of_handlers = 64 << 10;

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

/// The calling thread's alternate stack, above a page that nobody may touch.
class SignalStack {
 public:
  SignalStack() {
    stack_t now{};
    if (::sigaltstack(nullptr, &now) != 0 || !(now.ss_flags & SS_DISABLE)) return;
    // Processors with AMX save more than the constants of C allow for.
    const auto registers = std::max<std::size_t>(::getauxval(AT_MINSIGSTKSZ), MINSIGSTKSZ);
    guard_ = whole_pages(1), bytes_ = guard_ + whole_pages(registers + room_of_handlers);
    void* memory = ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    memory_ = static_cast<std::byte*>(memory);
    if (::mprotect(bottom(), bytes_ - guard_, PROT_READ | PROT_WRITE) != 0) return;
    const stack_t mine{bottom(), 0, bytes_ - guard_};
    ::sigaltstack(&mine, nullptr);
  }
  ~SignalStack() {
    if (!memory_) return;
    stack_t now{};
    const bool mine = ::sigaltstack(nullptr, &now) == 0 && now.ss_sp == bottom();
    const stack_t none{nullptr, SS_DISABLE, 0};
    if (!mine || ::sigaltstack(&none, nullptr) == 0) ::munmap(memory_, bytes_);
  }
  SignalStack(const SignalStack&) = delete;
  SignalStack& operator=(const SignalStack&) = delete;

 private:
  std::byte* bottom() const { return memory_ + guard_; }

  std::byte* memory_ = nullptr;  ///< null: none of ours
  std::size_t guard_ = 0, bytes_ = 0;
};

/// Signals that a thread brings upon itself, at an instruction whose stack is its own.
bool comes_at_any_moment(int signal) {
  constexpr std::array own{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPIPE, SIGXFSZ};
  return std::find(own.begin(), own.end(), signal) == own.end();
}

bool runs_on_threads_stack(int signal) {
  struct sigaction now {};
  if (::sigaction(signal, nullptr, &now) != 0 || (now.sa_flags & SA_ONSTACK)) return false;
  return (now.sa_flags & SA_SIGINFO) || (now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN);
}

std::string name_of(int signal) {
  const char* name = ::sigabbrev_np(signal);  // none for real-time signals
  return name ? cat("SIG", name) : cat("signal ", signal);
}

}  // namespace

sigset_t stop_signal_set() {
  sigset_t all;
  ::sigemptyset(&all);
  for (const int signal : stop_signals) ::sigaddset(&all, signal);
  return all;
}

SignalMask::SignalMask(int how, const sigset_t& signals) : back_(how == SIG_BLOCK ? SIG_UNBLOCK : SIG_BLOCK) {
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &before);
  ::sigemptyset(&changed_);
  for (const int signal : stop_signals)
    if (::sigismember(&signals, signal) && ::sigismember(&before, signal) == (how == SIG_UNBLOCK))
      ::sigaddset(&changed_, signal);
  ::pthread_sigmask(how, &changed_, nullptr);
}

SignalMask::~SignalMask() {
  ::pthread_sigmask(back_, &changed_, nullptr);
}

void ensure_signal_stack() {
  thread_local const SignalStack stack;
}

void begin_own_thread() {
  ensure_signal_stack();
  thread_local const SignalMask blocked(SIG_BLOCK, stop_signal_set());
}

void warn_of_handlers_on_threads_stacks() {
  static std::atomic<std::uint64_t> told{0};  // a bit for each signal
  for (int signal = 1; signal <= 64; ++signal) {
    if (!comes_at_any_moment(signal) || !runs_on_threads_stack(signal)) continue;
    const std::uint64_t bit = std::uint64_t{1} << (signal - 1);
    if (told.fetch_or(bit) & bit) continue;
    log_warning(
        "the handler of ", name_of(signal),
        " was installed without SA_ONSTACK, so it runs on the stack of whatever it interrupts: inside "
        "of some libraries' products of matrices that overwrites other memory. Install it with "
        "SA_ONSTACK (sigaction(), sa_flags), or train without what installed it, such as a profiler");
  }
}

}  // namespace sherd

#include "base/threads.h"

#include <pthread.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "base/log.h"

namespace sherd {
namespace {

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

/// A page below an alternate stack that nobody may touch.
std::size_t guard_bytes() {
  return whole_pages(1);
}

std::size_t stack_bytes() {
  constexpr std::size_t for_handlers = 64 << 10;  // profilers walk stacks
  // Processors with AMX save more registers than the constants of C allow for.
  return whole_pages(std::max<std::size_t>(::getauxval(AT_MINSIGSTKSZ), MINSIGSTKSZ) + for_handlers);
}

std::byte* bottom_of(void* memory) {
  return static_cast<std::byte*>(memory) + guard_bytes();
}

/// Gives the calling thread's alternate stack back, as it ends.
void unmap_stack(void* memory) {
  stack_t now{};
  const stack_t none{nullptr, SS_DISABLE, 0};
  const bool in_use = ::sigaltstack(nullptr, &now) == 0 && now.ss_sp == bottom_of(memory);
  if (!in_use || ::sigaltstack(&none, nullptr) == 0) ::munmap(memory, guard_bytes() + stack_bytes());
}

/// Where a thread's own is noted: what other things of the thread leave behind comes before it goes.
pthread_key_t stack_key() {
  static const pthread_key_t key = [] {
    pthread_key_t made = 0;
    require(::pthread_key_create(&made, unmap_stack) == 0, "the system gives out no more thread keys");
    return made;
  }();
  return key;
}

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
  ::sigaddset(&all, inquiry_signal);
  return all;
}

SignalMask::SignalMask(int how, const sigset_t& signals) : back_(how == SIG_BLOCK ? SIG_UNBLOCK : SIG_BLOCK) {
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &before);
  ::sigemptyset(&changed_);
  const sigset_t known = stop_signal_set();
  for (int signal = 1; signal < NSIG; ++signal)
    if (::sigismember(&known, signal) == 1 && ::sigismember(&signals, signal) &&
        ::sigismember(&before, signal) == (how == SIG_UNBLOCK))
      ::sigaddset(&changed_, signal);
  ::pthread_sigmask(how, &changed_, nullptr);
}

SignalMask::~SignalMask() {
  ::pthread_sigmask(back_, &changed_, nullptr);
}

void ensure_signal_stack() {
  const pthread_key_t key = stack_key();
  stack_t now{};
  if (::pthread_getspecific(key) || ::sigaltstack(nullptr, &now) != 0 || !(now.ss_flags & SS_DISABLE)) return;
  const std::size_t bytes = guard_bytes() + stack_bytes();
  void* memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  const stack_t mine{bottom_of(memory), 0, stack_bytes()};
  if (::mprotect(mine.ss_sp, mine.ss_size, PROT_READ | PROT_WRITE) == 0 &&
      ::pthread_setspecific(key, memory) == 0)
    ::sigaltstack(&mine, nullptr);
  else
    ::munmap(memory, bytes);
}

void begin_own_thread() {
  ensure_signal_stack();
  thread_local bool blocked = false;
  if (std::exchange(blocked, true)) return;
  const sigset_t all = stop_signal_set();
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
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

namespace {

constexpr std::size_t kib = 1024, usual = 8192 * kib, least = 512 * kib, least_of_threads = 2048 * kib;

void raise_threads_stacks() {
  pthread_attr_t attributes;
  if (::pthread_getattr_default_np(&attributes) != 0) return;
  std::size_t bytes = 0;
  ::pthread_attr_getstacksize(&attributes, &bytes);
  if (bytes < least_of_threads) {
    ::pthread_attr_setstacksize(&attributes, least_of_threads);
    ::pthread_setattr_default_np(&attributes);
  }
  ::pthread_attr_destroy(&attributes);
}

}  // namespace

void require_stack() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_STACK, &limit) != 0) return;
  if (limit.rlim_cur < usual) {  // RLIM_INFINITY is the largest number
    limit.rlim_cur = std::min<rlim_t>(usual, limit.rlim_max);
    ::setrlimit(RLIMIT_STACK, &limit);
    ::getrlimit(RLIMIT_STACK, &limit);
  }
  if (limit.rlim_cur < least)
    fail(ErrorKind::memory, "the stack is limited to ", limit.rlim_cur / kib, " KiB, and Sherd needs ",
         least / kib, " KiB: raise the limit (ulimit -s ", usual / kib, ")");
  raise_threads_stacks();
}

}  // namespace sherd

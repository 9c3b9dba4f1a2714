#include "cli/memory_reserve.h"

#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <new>
#include <string_view>

namespace sherd::cli {
namespace {

constexpr std::size_t reserved_bytes = std::size_t{4} << 20;

// Handlers have no owner but the process: variables that belong to no object.
std::atomic<void*> reserve{nullptr};
std::terminate_handler usual_end = nullptr;
std::new_handler usual_handler = nullptr;

void release() noexcept {
  if (void* memory = reserve.exchange(nullptr)) ::munmap(memory, reserved_bytes);
}

/// The request at hand fails; those that its failure leads to need not.
[[noreturn]] void on_no_memory() {
  release();
  throw std::bad_alloc();
}

[[noreturn]] void on_terminate() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    constexpr std::string_view message =
        "sherd: error: out of memory: raise this process's limit (ulimit -v), or use a smaller model or "
        "micro-batch\n";
    [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, message.data(), message.size());
    ::_exit(1);
  } catch (...) {
  }
  usual_end();
  ::_exit(1);  // not reached: the usual end aborts
}

/// A thread's own heap takes 128 MiB of addresses at a time, which others may need meanwhile.
void share_one_heap_where_addresses_are_limited() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) ::mallopt(M_ARENA_MAX, 1);
}

}  // namespace

MemoryReserve::MemoryReserve() {
  share_one_heap_where_addresses_are_limited();
  void* memory = ::mmap(nullptr, reserved_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  reserve = memory;
  usual_end = std::set_terminate(on_terminate);
  usual_handler = std::set_new_handler(on_no_memory);
}

MemoryReserve::~MemoryReserve() {
  std::set_new_handler(usual_handler);
  std::set_terminate(usual_end);
  release();
}

}  // namespace sherd::cli

#include "base/stack.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstddef>

#include "base/error.h"

namespace sherd {
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

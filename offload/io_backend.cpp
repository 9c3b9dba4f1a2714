#include "offload/io_backend.h"

#include "base/error.h"
#include "base/excerpt.h"
#include "base/log.h"

namespace sherd::offload {

std::unique_ptr<IoBackend> make_backend(const StoreOptions& options, bool direct) {
  using Backend = StoreOptions::Backend;
  // Through the page cache io_uring only hands requests to threads of the kernel's own.
  if (options.backend == Backend::threads || (options.backend == Backend::automatic && !direct))
    return make_thread_backend(options);
  std::string why;
  if (auto backend = make_uring_backend(options, &why)) return backend;
  if (options.backend == Backend::io_uring)
    fail(ErrorKind::io, "io_uring was asked for and cannot be used: ", why);
  log_info("io_uring cannot be used (", why, "): reading and writing with ",
           counted(options.thread_count, "thread"), " instead");
  return make_thread_backend(options);
}

}  // namespace sherd::offload

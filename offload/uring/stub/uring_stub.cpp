#include "offload/io_backend.h"

namespace sherd::offload {

std::unique_ptr<IoBackend> make_uring_backend(const StoreOptions&, std::string* why) {
  *why =
      "this build lacks it: install liburing's development package (on Debian liburing-dev) and build again";
  return nullptr;
}

}  // namespace sherd::offload

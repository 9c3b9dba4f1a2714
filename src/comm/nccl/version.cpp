#include <dlfcn.h>
#include <nccl.h>

#include "base/error.h"
#include "comm/library_version.h"

namespace sherd::comm {

std::string nccl_version() {
  const std::string built = cat(NCCL_MAJOR, '.', NCCL_MINOR, '.', NCCL_PATCH);
  void* const library = ::dlopen(cat("libnccl.so.", NCCL_MAJOR).c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return built;
  int number = NCCL_VERSION_CODE;
  if (const auto ask = reinterpret_cast<int (*)(int*)>(::dlsym(library, "ncclGetVersion"))) ask(&number);
  ::dlclose(library);
  if (number == NCCL_VERSION_CODE) return built;
  return cat(built, " (", number / 10000, '.', number / 100 % 100, '.', number % 100, " loaded)");
}

}  // namespace sherd::comm

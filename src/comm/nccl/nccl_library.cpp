// Apart from the route, so that tests can run that one on cards of their own.
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <string_view>

#include "base/error.h"
#include "base/random.h"
#include "comm/nccl/nccl_route.h"
#include "device/cuda/cuda_device.h"

namespace sherd::comm {

std::uint64_t nccl_card(device::Accelerator& gpu) {
  const auto& uuid = device::as_cuda(gpu).gpu().uuid;
  if (std::all_of(uuid.begin(), uuid.end(), [](std::uint8_t byte) { return byte == 0; })) return 0;
  return stable_hash(std::string_view(reinterpret_cast<const char*>(uuid.data()), uuid.size()));
}

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

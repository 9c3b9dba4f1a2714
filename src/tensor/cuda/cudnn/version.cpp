#include <cudnn_version.h>
#include <dlfcn.h>

#include "base/error.h"
#include "tensor/library_version.h"

namespace sherd::tensor {

std::size_t loaded_cudnn() {
  void* const library = ::dlopen(cat("libcudnn.so.", CUDNN_MAJOR).c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return 0;
  const auto ask = reinterpret_cast<std::size_t (*)()>(::dlsym(library, "cudnnGetVersion"));
  const std::size_t number = ask ? ask() : CUDNN_VERSION;
  ::dlclose(library);
  return number;
}

std::string cudnn_version() {
  const std::string built = cat(CUDNN_MAJOR, '.', CUDNN_MINOR, '.', CUDNN_PATCHLEVEL);
  const std::size_t number = loaded_cudnn();
  if (number == 0 || number == CUDNN_VERSION) return built;
  return cat(built, " (", number / 10000, '.', number / 100 % 100, '.', number % 100, " loaded)");
}

}  // namespace sherd::tensor

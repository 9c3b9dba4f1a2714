#include "device/cuda/lazy_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "base/error.h"

namespace sherd::device::cuda {

LazyLibrary::LibraryEntry::LibraryEntry(LazyLibrary& library, const char* name)
    : library_(library), name_(name), next_(library.entries_) {
  library.entries_ = this;
}

std::string LazyLibrary::file() const {
  return cat("lib", names_.stem, ".so.", names_.major);
}

/// The name to give dlopen(). A file that is there is taken even if it turns out to be none: the dynamic
/// linker would do the same, and whoever put it there should hear of it.
std::string LazyLibrary::path() const {
  namespace fs = std::filesystem;
  const char* listed = ::secure_getenv("LD_LIBRARY_PATH");
  std::istringstream folders(cat(listed ? listed : "", ":", names_.folder));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path found = fs::path(folder) / file();
    std::error_code ignored;
    if (!folder.empty() && fs::exists(found, ignored)) return found;
  }
  return file();
}

void LazyLibrary::open() {
  const std::string from = path();
  const std::string next_step = cat("install ", names_.package, ", put the folder that holds ", file(),
                                    " into LD_LIBRARY_PATH, or set device.type to \"cpu\"");
  void* const library = ::dlopen(from.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = ::dlerror();
    fail(ErrorKind::io, names_.title, " cannot be loaded: ", why ? why : from, "; ", next_step);
  }
  for (LibraryEntry* entry = entries_; entry; entry = entry->next_) {
    entry->address_ = ::dlsym(library, entry->name_);
    if (!entry->address_)
      fail(ErrorKind::io, names_.title, " in ", from, " has no function ", entry->name_,
           ", so it is not the version that Sherd was built with; ", next_step);
  }
}

}  // namespace sherd::device::cuda

#pragma once

#include <mutex>
#include <string>

namespace sherd::device::cuda {

/// A shared library that is loaded when the first of its functions is called, so that a process which uses no
/// GPU spends neither time nor memory on it. It is looked for where the dynamic linker would look for a
/// program linked to it: in the folders of LD_LIBRARY_PATH, in the one where the build found it, then in the
/// system's.
class LazyLibrary {
 public:
  struct Names {
    const char* title;    ///< "NCCL"
    const char* stem;     ///< "nccl" of libnccl.so.2
    int major;            ///< 2 of it: the version of the headers
    const char* folder;   ///< where the build found it
    const char* package;  ///< package to install: "NVIDIA's package libnccl2"
  };

  /// One function's place in the library. Made before main(), and never destroyed.
  class LibraryEntry {
   protected:
    LibraryEntry(LazyLibrary& library, const char* name);
    LazyLibrary& library_;
    void* address_ = nullptr;  ///< set once the library is loaded

   private:
    friend class LazyLibrary;
    const char* name_;
    LibraryEntry* next_;
  };

  explicit LazyLibrary(const Names& names) : names_(names) {}
  LazyLibrary(const LazyLibrary&) = delete;
  LazyLibrary& operator=(const LazyLibrary&) = delete;

  /// Loads the library and finds all functions that it is declared with; does nothing when that is done.
  /// Throws Error{io}, after which the next call tries again. Safe from any thread.
  void load() {
    std::call_once(loaded_, [this] { open(); });
  }

 private:
  std::string file() const;
  std::string path() const;
  void open();

  const Names names_;
  LibraryEntry* entries_ = nullptr;
  std::once_flag loaded_;
};

/// A function of a LazyLibrary, called as if it were linked; throws Error{io} where the library cannot be
/// loaded.
template <class Signature>
class LazyFunction;
template <class Result, class... Parameters>
class LazyFunction<Result(Parameters...)> : private LazyLibrary::LibraryEntry {
 public:
  LazyFunction(LazyLibrary& library, const char* name) : LibraryEntry(library, name) {}
  Result operator()(Parameters... arguments) {
    library_.load();
    return reinterpret_cast<Result (*)(Parameters...)>(address_)(arguments...);
  }
};

}  // namespace sherd::device::cuda

/// In a namespace of our own: `name` means that function of `library` from here on, not the one that the
/// library's header declares, which would have to be linked.
#define SHERD_LAZY_FUNCTION(library, name) \
  inline ::sherd::device::cuda::LazyFunction<decltype(::name)> name(library, #name)

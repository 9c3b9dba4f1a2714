#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "offload/store.h"

namespace sherd::offload {

/// One positional read or write of a store's file. Offset, address and length are multiples of 4096.
struct IoRequest {
  bool write = false;
  std::uint64_t offset = 0;
  std::byte* memory = nullptr;
  std::uint32_t bytes = 0;
  int registered = -1;    ///< register_memory()'s number for the memory around; -1: none
  std::uint64_t tag = 0;  ///< comes back in the completion
};

/// How a request ended: the bytes that were moved, maybe fewer than asked for, or a negative errno.
struct IoCompletion {
  std::uint64_t tag = 0;
  std::int64_t result = 0;
};

/// Moves the bytes: io_uring, threads, or a test's decorator around one of them. One thread calls
/// submit() and reap(); the other members may be called from any.
class IoBackend {
 public:
  virtual ~IoBackend() = default;
  virtual std::string name() const = 0;

  /// Called once, before anything else: the file that requests mean. It stays open as long as the backend
  /// lives.
  virtual void attach(int descriptor) = 0;

  /// Tells the kernel of memory that requests will use again and again. Returns a handle for IoRequest, or -1
  /// when that is refused; `why` then says why.
  virtual int register_memory(std::span<std::byte> memory, std::string* why) = 0;
  virtual void unregister_memory(int handle) noexcept = 0;

  /// Starts requests; never more under way than the depth that the backend was made for.
  virtual void submit(std::span<const IoRequest> requests) = 0;
  /// Waits until a request has ended, wake() was called or `patience` has passed, and returns how many
  /// completions it stored; 0 is possible at any time.
  virtual std::size_t reap(std::span<IoCompletion> completions, std::chrono::nanoseconds patience) = 0;
  /// Makes the current reap(), or the next one, return.
  virtual void wake() noexcept = 0;
};

/// io_uring with options.queue_depth entries. Null when the build or the kernel lacks it; `why` then says
/// why.
std::unique_ptr<IoBackend> make_uring_backend(const StoreOptions& options, std::string* why);

/// Positional reads and writes on options.thread_count threads.
std::unique_ptr<IoBackend> make_thread_backend(const StoreOptions& options);

/// The backend that options.backend asks for. `automatic` falls back to threads, and so it does for a file
/// that is not opened past the page cache. Throws Error{io} when io_uring is asked for by name and refused.
std::unique_ptr<IoBackend> make_backend(const StoreOptions& options, bool direct);

}  // namespace sherd::offload

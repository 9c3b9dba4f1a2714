#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace sherd::offload {

class TransferQueue;

/// The extent that a Span names: bytes [begin, begin + bytes) of the file, begin a multiple of the page. The
/// rest of the last page is nobody's, and zeros.
struct Extent {
  const TransferQueue* owner = nullptr;
  int id = 0;
  std::string name;
  std::uint64_t begin = 0, bytes = 0;
  /// CRC-32C of each page as it was last written; empty without checksums. The store's thread only, as two
  /// transfers of one page never run at once.
  std::vector<std::uint32_t> checksums;
};

/// An error, kept to be thrown on other threads.
struct Failure {
  ErrorKind kind = ErrorKind::io;
  std::string message;
  [[noreturn]] void raise() const { throw Error(kind, message); }
};

/// One read() or write() of a store, until its last request has ended.
struct Transfer {
  // Set at the start.
  std::shared_ptr<TransferQueue> queue;
  std::shared_ptr<Extent> extent;
  bool write = false;
  std::uint64_t offset = 0;  // in the extent
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  int registered = -1;  // the memory's handle with the backend, where it is a pool's

  // Guarded by the queue's lock; `done` may be read without.
  bool deferred = false;                             // a read that has no memory yet, and must not run
  int blockers = 0;                                  // earlier transfers that must end first
  std::vector<std::shared_ptr<Transfer>> followers;  // whose blocker this is
  std::optional<Failure> failure;                    // set before `done`
  std::atomic<bool> done = false;                    // nobody touches memory that is not leased any more

  // The store's thread only, from the start on.
  std::shared_ptr<void> lease;  // keeps the memory, where it is a pool's, while requests may use it
  std::uint64_t cut = 0;        // bytes that have become requests
  int under_way = 0;            // requests
  std::chrono::steady_clock::time_point begun;
};

}  // namespace sherd::offload

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace sherd::offload {

class TransferQueue;

/// The extent that a Span names: bytes [begin, begin + bytes) of the file, begin a multiple of the page. The
/// rest of the last page is nobody's, and zeros.
struct Extent {
  const TransferQueue* owner = nullptr;
  std::string name = {};
  std::uint64_t begin = 0, bytes = 0;
  /// CRC-32C of each page as it was last written; empty without checksums. The store's thread only, as two
  /// transfers of one page never run at once.
  std::vector<std::uint32_t> checksums = {};
};

/// An error, kept to be thrown on other threads.
struct Failure {
  ErrorKind kind = ErrorKind::io;
  std::string message;
  [[noreturn]] void raise() const { throw Error(kind, message); }
};

/// One read() or write() of a store, until its last request has ended.
struct Transfer {
  Transfer(std::shared_ptr<TransferQueue> by, std::shared_ptr<Extent> of, bool writes, std::uint64_t at,
           std::size_t count)
      : queue(std::move(by)), extent(std::move(of)), write(writes), offset(at), bytes(count) {}

  // Set at the start.
  const std::shared_ptr<TransferQueue> queue;
  const std::shared_ptr<Extent> extent;
  const bool write;
  const std::uint64_t offset;  // in the extent
  const std::size_t bytes;
  std::byte* memory = nullptr;
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

/// How transfers are cut into requests. Multiples of the page.
struct Cutting {
  std::size_t direct_bytes = 0;  ///< at most, of requests in the caller's own memory
  std::size_t bounce_bytes = 0;  ///< at most, of requests through the store's buffers
};

/// One request of a transfer: `bytes` bytes of the caller's `memory`, which lie `skip` bytes into
/// the whole pages [file_begin, file_begin + file_bytes) of the file.
struct TransferPiece {
  std::uint64_t file_begin = 0;
  std::size_t file_bytes = 0;
  std::size_t skip = 0, bytes = 0;
  std::byte* memory = nullptr;
  bool direct = false;  ///< the kernel is given `memory` itself, whole pages on page boundaries
  bool merge = false;   ///< a write that must first fetch what its pages hold around it
};

/// The piece of a transfer that begins at transfer.cut. Memory that is leased goes directly wherever file and
/// memory share their page boundaries, but for ragged ends; and for small ragged transfers, where one request
/// is worth more than a copy saved.
TransferPiece next_piece(const Transfer& transfer, const Cutting& cutting);

/// Bytes that the checksums of an extent take.
std::uint64_t checksum_bytes(std::uint64_t bytes);

/// The checksums of an extent that holds zeros.
std::vector<std::uint32_t> checksums_of_zeros(std::uint64_t bytes);

/// Remembers the checksums of whole pages that are about to be written at byte `at` of the extent, where it
/// has checksums.
void note_pages(Extent& extent, std::uint64_t at, const std::byte* pages, std::size_t bytes);

/// The offset in the extent of the first page read at `at` whose checksum differs; nothing where all are as
/// written.
std::optional<std::uint64_t> find_bad_page(const Extent& extent, std::uint64_t at, const std::byte* pages,
                                           std::size_t bytes);

}  // namespace sherd::offload

#pragma once

#include <cstddef>
#include <cstdint>

#include "offload/queue/transfer.h"

namespace sherd::offload {

/// How transfers are cut into requests. Multiples of the page.
struct Cutting {
  std::size_t direct_bytes = 0;  ///< at most, of requests in the caller's own memory
  std::size_t bounce_bytes = 0;  ///< at most, of requests through the store's buffers
};

/// One request of a transfer: `bytes` bytes of the caller's `memory`, which lie `skip` bytes into
/// the whole pages [file_begin, file_begin + file_bytes) of the file.
struct Piece {
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
Piece next_piece(const Transfer& transfer, const Cutting& cutting);

}  // namespace sherd::offload

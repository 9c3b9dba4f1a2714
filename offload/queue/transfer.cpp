#include "offload/queue/transfer.h"

#include <algorithm>

#include "base/crc32c.h"
#include "offload/file/swap_file.h"

namespace sherd::offload {
namespace {

/// Below this a ragged transfer is copied whole.
constexpr std::size_t small_transfer = 16 * page;

/// Whether pages of the file are pages of the memory.
bool congruent(const Transfer& transfer) {
  return (reinterpret_cast<std::uintptr_t>(transfer.memory) - transfer.offset) % page == 0;
}

bool ragged(const Transfer& transfer) {
  return transfer.offset % page != 0 || transfer.bytes % page != 0;
}

}  // namespace

TransferPiece next_piece(const Transfer& transfer, const Cutting& cutting) {
  const std::uint64_t at = transfer.offset + transfer.cut;
  const std::size_t left = transfer.bytes - transfer.cut;
  TransferPiece piece;
  piece.skip = at % page;
  piece.memory = transfer.memory + transfer.cut;
  const bool aims_direct =
      transfer.lease && congruent(transfer) && (transfer.bytes >= small_transfer || !ragged(transfer));
  piece.direct = aims_direct && piece.skip == 0 && left >= page;
  if (piece.direct)
    piece.bytes = std::min(cutting.direct_bytes, left / page * page);
  else
    piece.bytes = std::min((aims_direct ? page : cutting.bounce_bytes) - piece.skip, left);
  piece.file_begin = transfer.extent->begin + at - piece.skip;
  piece.file_bytes = round_up(piece.skip + piece.bytes, page);
  // The rest of the last page, behind the end of the extent, need not be kept.
  const std::uint64_t end = at + piece.bytes;
  piece.merge = transfer.write && (piece.skip != 0 || (end % page != 0 && end != transfer.extent->bytes));
  return piece;
}

std::uint64_t checksum_bytes(std::uint64_t bytes) {
  return round_up(bytes, page) / page * sizeof(std::uint32_t);
}

std::vector<std::uint32_t> checksums_of_zeros(std::uint64_t bytes) {
  const std::vector<std::byte> zeros(page);
  return std::vector<std::uint32_t>(round_up(bytes, page) / page, crc32c(zeros.data(), page));
}

void note_pages(Extent& extent, std::uint64_t at, const std::byte* pages, std::size_t bytes) {
  if (extent.checksums.empty()) return;
  for (std::size_t i = 0; i < bytes; i += page) extent.checksums[(at + i) / page] = crc32c(pages + i, page);
}

std::optional<std::uint64_t> find_bad_page(const Extent& extent, std::uint64_t at, const std::byte* pages,
                                           std::size_t bytes) {
  if (extent.checksums.empty()) return {};
  for (std::size_t i = 0; i < bytes; i += page)
    if (extent.checksums[(at + i) / page] != crc32c(pages + i, page)) return at + i;
  return {};
}

}  // namespace sherd::offload

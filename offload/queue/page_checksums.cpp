#include "offload/queue/page_checksums.h"

#include "base/crc32c.h"
#include "offload/file/swap_file.h"

namespace sherd::offload {

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

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "offload/queue/transfer.h"

namespace sherd::offload {

/// Bytes that the checksums of an extent take.
std::uint64_t checksum_bytes(std::uint64_t bytes);

/// The checksums of an extent that holds zeros.
std::vector<std::uint32_t> checksums_of_zeros(std::uint64_t bytes);

/// Remembers whole pages that are about to be written at byte `at` of the extent. Nothing without checksums.
void note_pages(Extent& extent, std::uint64_t at, const std::byte* pages, std::size_t bytes);

/// The offset in the extent of the first page read at `at` that is not what was written.
std::optional<std::uint64_t> find_bad_page(const Extent& extent, std::uint64_t at, const std::byte* pages,
                                           std::size_t bytes);

}  // namespace sherd::offload

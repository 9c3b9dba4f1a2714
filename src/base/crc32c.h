#pragma once

#include <cstddef>
#include <cstdint>

namespace sherd {

/// CRC-32C (Castagnoli; RFC 3720 appendix B.4) of `bytes` bytes, continued from `crc`, the value for what
/// came before.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0);

/// The same by table, for processors without the instruction.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc = 0);

}  // namespace sherd

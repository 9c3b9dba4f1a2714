#pragma once

#include <cstddef>
#include <cstdint>

namespace sherd {

/// CRC-32C (Castagnoli; RFC 3720 appendix B.4) of `bytes` bytes, continued from `crc`, the value for what
/// came before.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0);

/// crc32c() of two runs of bytes, one after the other, from that of each and the length of the second.
std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);

/// The same by table, for processors without the instruction.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc = 0);

/// The size and checksum of a file; the checksum is crc32c() of its bytes.
struct FileChecksum {
  std::uint64_t bytes = 0;
  std::uint32_t crc32c = 0;
  bool operator==(const FileChecksum&) const = default;
};

}  // namespace sherd

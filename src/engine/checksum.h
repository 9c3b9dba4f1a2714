#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace sherd::engine {

/// CRC-32C (Castagnoli; RFC 3720 appendix B.4) of `bytes` bytes, continued from `crc`, the value for what
/// came before.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0);

/// The same by table, for processors without the instruction.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc = 0);

/// What a manifest keeps of a file; the checksum is crc32c() of its bytes.
struct FileChecksum {
  std::uint64_t bytes = 0;
  std::uint32_t crc32c = 0;
  bool operator==(const FileChecksum&) const = default;
};

/// Reads the whole file. Throws Error{io}.
FileChecksum checksum_file(const std::filesystem::path& path);

}  // namespace sherd::engine

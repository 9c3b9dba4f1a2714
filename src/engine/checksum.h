#pragma once

#include <cstdint>
#include <filesystem>

namespace sherd::engine {

/// What a manifest keeps of a file; the checksum is sherd::crc32c() of its bytes.
struct FileChecksum {
  std::uint64_t bytes = 0;
  std::uint32_t crc32c = 0;
  bool operator==(const FileChecksum&) const = default;
};

/// Reads the whole file. Throws Error{io}.
FileChecksum checksum_file(const std::filesystem::path& path);

}  // namespace sherd::engine

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace sherd::data {

/// A file mapped read-only for as long as the object lives. Safe to read from any thread. The file must not
/// be truncated meanwhile (datasets are replaced by renaming, never in place).
class MappedFile {
 public:
  /// What the kernel should expect: one pass, or jumps.
  enum class Access { sequential, random };

  /// Throws Error{io} naming the file when it cannot be opened, is no regular file or cannot be mapped.
  explicit MappedFile(std::filesystem::path path, Access access = Access::sequential);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::uint64_t size() const { return size_; }

  /// Asks the kernel to read [offset, offset + bytes) ahead; returns at once.
  void will_need(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace sherd::data

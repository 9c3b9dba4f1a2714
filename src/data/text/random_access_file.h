#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "base/files.h"

namespace sherd::data {

/// A regular file that is read at any offset, from any thread. It is not mapped: a file that is cut while it
/// is mapped ends the process by SIGBUS, and here it is an error that names the file.
class RandomAccessFile {
 public:
  /// The access that the kernel should expect: one pass, or jumps.
  enum class Access { sequential, random };

  /// Throws Error{io} naming the file when it cannot be opened or is no regular file.
  RandomAccessFile(std::filesystem::path path, Access access);

  const std::filesystem::path& path() const { return path_; }
  /// In bytes, when it was opened.
  std::uint64_t size() const { return size_; }

  /// Fills `out` with the bytes from `offset` on, which lie within size(). Throws Error{data} when the file
  /// has become too short for that, Error{io} when it cannot be read; both name it.
  void read(std::uint64_t offset, std::span<std::byte> out) const;

  /// Asks the kernel to read [offset, offset + bytes) ahead; returns at once.
  void will_need(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  [[noreturn]] void fail_short() const;

  std::filesystem::path path_;
  FileDescriptor file_;
  std::uint64_t size_ = 0;
};

}  // namespace sherd::data

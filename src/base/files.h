#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

namespace sherd {

/// A file descriptor; closes what it still holds.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// A file that appears under its name whole or not at all: bytes go to `path` + ".partial" beside it,
/// commit() syncs them, renames and syncs the folder. Dropped without commit(), it leaves what was at `path`
/// as it was. A symbolic link is followed, and what is there and no regular file (a pipe, a terminal,
/// /dev/null) is written to in place.
///
/// write_at() may be called from several threads; everything else from one. Every failure throws Error{io}
/// naming the file and the system's reason; a full disk says how many bytes were wanted.
class AtomicFile {
 public:
  /// Creates the partial file, replacing one that an earlier crash left. The folder must exist.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;

  /// Sets the size and asks the file system for the space, so that a full disk is found before the work is
  /// done.
  void reserve(std::uint64_t bytes);
  /// Writes at the end of what write() wrote so far.
  void write(const void* data, std::size_t bytes);
  void write_at(std::uint64_t offset, const void* data, std::size_t bytes);
  /// Completes the file. Nothing may be written afterwards. Without `durable` nothing waits for the disk, and
  /// a power cut may leave what was at `path`, or less.
  void commit(bool durable = true);

  const std::filesystem::path& path() const { return path_; }

 private:
  void remove_partial() const;
  void write_on(const void* data, std::size_t bytes);

  std::filesystem::path path_, partial_;
  bool in_place_ = false;
  int descriptor_ = -1;
  std::uint64_t end_ = 0;
};

/// Writes a whole small file through an AtomicFile.
void write_file_atomically(const std::filesystem::path& path, std::string_view content, bool durable = true);

/// Syncs a folder's entries, so that names created or renamed in it survive a power cut.
void sync_folder(const std::filesystem::path& folder);

/// Renames the folder `partial` to `final_name`, which must not exist, after syncing `partial`, and syncs the
/// folder that holds both: the last act of a checkpoint. Both must lie in one file system.
void publish_folder(const std::filesystem::path& partial, const std::filesystem::path& final_name);

/// All bytes of a file. Throws Error{io} where it cannot be read, Error{data} where it has more than
/// 256 MiB.
std::string read_file(const std::filesystem::path& path);

}  // namespace sherd

#include "base/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace sherd {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail_errno(const char* action, const fs::path& path, int error) {
  const char* next = error == ENOSPC || error == EDQUOT ? ". Free space there, or save elsewhere"
                     : error == EACCES || error == EPERM || error == EROFS
                         ? ". Choose a folder that this user may write"
                     : error == ENOENT ? ". Create the folder first"
                                       : "";
  fail(ErrorKind::io, "cannot ", action, " '", path.string(), "': ", std::strerror(error), next);
}

void write_fully(int descriptor, const fs::path& path, std::uint64_t offset, const std::byte* data,
                 std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::pwrite(descriptor, data, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail_errno(cat("write ", bytes, " bytes to").c_str(), path, done < 0 ? errno : ENOSPC);
    data += done, offset += static_cast<std::uint64_t>(done), bytes -= static_cast<std::size_t>(done);
  }
}

fs::path parent_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)) {
  std::error_code absent;
  if (fs::is_symlink(fs::symlink_status(path_, absent))) path_ = fs::weakly_canonical(path_, absent);
  const fs::file_status there = fs::status(path_, absent);
  in_place_ = fs::exists(there) && !fs::is_regular_file(there);
  partial_ = path_;
  if (!in_place_) partial_ += ".partial";
  descriptor_ = ::open(partial_.c_str(), (in_place_ ? 0 : O_CREAT | O_TRUNC) | O_WRONLY | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_errno(in_place_ ? "open" : "create", path_, errno);
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(other.path_),
      partial_(other.partial_),
      in_place_(other.in_place_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      end_(other.end_) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  remove_partial();
}

void AtomicFile::remove_partial() const {
  if (!in_place_) ::unlink(partial_.c_str());
}

void AtomicFile::reserve(std::uint64_t bytes) {
  // Not every file system can allocate ahead; there the size alone is set.
  const int error = bytes ? ::posix_fallocate(descriptor_, 0, static_cast<off_t>(bytes)) : 0;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    fail_errno(cat("reserve ", bytes, " bytes for").c_str(), path_, error);
  if (::ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) fail_errno("resize", partial_, errno);
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  if (in_place_)
    write_on(data, bytes);
  else
    write_at(end_, data, bytes);
  end_ += bytes;
}

/// Pipes and terminals have no offsets.
void AtomicFile::write_on(const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(descriptor_, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail_errno("write to", path_, done < 0 ? errno : ENOSPC);
    at += done, bytes -= static_cast<std::size_t>(done);
  }
}

void AtomicFile::write_at(std::uint64_t offset, const void* data, std::size_t bytes) {
  require(descriptor_ >= 0, "'", path_.string(), "' is complete; nothing more can be written to it");
  write_fully(descriptor_, partial_, offset, static_cast<const std::byte*>(data), bytes);
}

void AtomicFile::commit(bool durable) {
  require(descriptor_ >= 0, "'", path_.string(), "' is already complete");
  // An entry that is no file may have nothing to sync.
  if (durable && ::fsync(descriptor_) != 0 &&
      !(in_place_ && (errno == EINVAL || errno == EROFS || errno == ENOTSUP)))
    fail_errno("sync", partial_, errno);
  // Network file systems report a late failed write here.
  if (::close(std::exchange(descriptor_, -1)) != 0) {
    const int error = errno;
    remove_partial();
    fail_errno("close", partial_, error);
  }
  if (in_place_) return;
  if (::rename(partial_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    remove_partial();
    fail_errno("rename the finished file to", path_, error);
  }
  if (durable) sync_folder(parent_of(path_));
}

void write_file_atomically(const fs::path& path, std::string_view content, bool durable) {
  AtomicFile file(path);
  file.write(content.data(), content.size());
  file.commit(durable);
}

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_errno("open the folder", folder, errno);
  const int result = ::fsync(descriptor), error = errno;
  ::close(descriptor);
  // Some network and FUSE file systems do not sync folders; their renames are as durable as they get.
  if (result != 0 && error != EINVAL && error != ENOTSUP) fail_errno("sync the folder", folder, error);
}

void publish_folder(const fs::path& partial, const fs::path& final_name) {
  sync_folder(partial);
  // rename(2) would silently replace an empty folder.
  if (fs::exists(fs::symlink_status(final_name))) fail_errno("publish the folder as", final_name, EEXIST);
  if (::rename(partial.c_str(), final_name.c_str()) != 0)
    fail_errno("publish the folder as", final_name, errno);
  sync_folder(parent_of(final_name));
}

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) fail(ErrorKind::io, "cannot read '", path.string(), "': ", error.message());
  if (bytes > std::uintmax_t{256} << 20)
    fail(ErrorKind::data, "'", path.string(), "' has ", bytes, " bytes, more than any file of its kind");
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  if (!in || (bytes > 0 && !(text << in.rdbuf()))) fail(ErrorKind::io, "cannot read '", path.string(), "'");
  return std::move(text).str();
}

}  // namespace sherd

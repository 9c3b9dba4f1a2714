#include "data/text/random_access_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace sherd::data {

RandomAccessFile::RandomAccessFile(std::filesystem::path path, Access access)
    : path_(std::move(path)),
      // Opening a pipe without O_NONBLOCK would wait for its writer.
      file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!file_) fail(ErrorKind::io, "cannot open '", path_.string(), "': ", std::strerror(errno));
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0 || !S_ISREG(status.st_mode))
    fail(ErrorKind::io, "cannot read '", path_.string(), "': it is not a regular file");
  size_ = static_cast<std::uint64_t>(status.st_size);
  ::posix_fadvise(file_.get(), 0, 0, access == Access::random ? POSIX_FADV_RANDOM : POSIX_FADV_SEQUENTIAL);
}

void RandomAccessFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  require(offset <= size_ && out.size() <= size_ - offset, "bytes ", offset, " to ", offset + out.size(),
          " of '", path_.string(), "', which has ", size_);
  while (!out.empty()) {
    const ssize_t got = ::pread(file_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(ErrorKind::io, "cannot read '", path_.string(), "': ", std::strerror(errno));
    if (got == 0) fail_short();
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

void RandomAccessFile::fail_short() const {
  struct stat status {};
  ::fstat(file_.get(), &status);
  fail(ErrorKind::data, "'", path_.string(), "' was cut while in use: it had ", size_,
       " bytes when it was opened, and has ", status.st_size,
       " now; put the whole file back, and go on from the last checkpoint");
}

void RandomAccessFile::will_need(std::uint64_t offset, std::uint64_t bytes) const {
  // Only advice: failure changes nothing.
  ::posix_fadvise(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}

}  // namespace sherd::data

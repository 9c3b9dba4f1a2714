#include "data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace sherd::data {

MappedFile::MappedFile(std::filesystem::path path, Access access) : path_(std::move(path)) {
  const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(ErrorKind::io, "cannot open '", path_.string(), "': ", std::strerror(errno));
  struct stat status {};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor);
    fail(ErrorKind::io, "cannot map '", path_.string(), "': it is not a regular file");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  void* data = size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
  const int error = errno;
  ::close(descriptor);
  if (data == MAP_FAILED) fail(ErrorKind::io, "cannot map '", path_.string(), "': ", std::strerror(error));
  data_ = static_cast<const std::byte*>(data);
  if (data_) ::madvise(data, size_, access == Access::random ? MADV_RANDOM : MADV_SEQUENTIAL);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::will_need(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset >= size_ || bytes == 0) return;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset / page * page, end = std::min<std::uint64_t>(size_, offset + bytes);
  ::madvise(const_cast<std::byte*>(data_) + begin, end - begin,
            MADV_WILLNEED);  // advice: failure changes nothing
}

}  // namespace sherd::data

#include "engine/checkpoint/checksum.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/error.h"

namespace sherd::engine {

FileChecksum checksum_file(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(ErrorKind::io, "cannot open '", path.string(), "': ", std::strerror(errno));
  ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_SEQUENTIAL);
  std::vector<std::byte> buffer(1 << 20);
  FileChecksum sum;
  for (;;) {
    const ssize_t got = ::read(descriptor, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      ::close(descriptor);
      fail(ErrorKind::io, "cannot read '", path.string(), "': ", std::strerror(error));
    }
    if (got == 0) break;
    sum.bytes += static_cast<std::uint64_t>(got);
    sum.crc32c = crc32c(buffer.data(), static_cast<std::size_t>(got), sum.crc32c);
  }
  ::close(descriptor);
  return sum;
}

}  // namespace sherd::engine

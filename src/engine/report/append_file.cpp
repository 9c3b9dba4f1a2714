#include "engine/report/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace sherd::engine {

AppendFile::AppendFile(std::filesystem::path path, bool keep, std::string what)
    : path_(std::move(path)), what_(std::move(what)) {
  descriptor_ = ::open(path_.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC | (keep ? O_APPEND : O_TRUNC), 0666);
  if (descriptor_ < 0) fail_errno("open");
}

AppendFile::~AppendFile() {
  ::close(descriptor_);
}

void AppendFile::write(std::string_view piece) {
  while (!piece.empty()) {
    const ssize_t wrote = ::write(descriptor_, piece.data(), piece.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail_errno("write to");
    piece.remove_prefix(static_cast<std::size_t>(wrote));
  }
}

void AppendFile::fail_errno(const char* action) const {
  fail(ErrorKind::io, "cannot ", action, " ", what_, " '", path_.string(), "': ", std::strerror(errno));
}

}  // namespace sherd::engine

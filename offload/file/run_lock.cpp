#include "offload/file/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/error.h"

namespace sherd::offload {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail_errno(const char* action, const fs::path& path, int error) {
  const char* next = error == EACCES || error == EPERM || error == EROFS || error == ENOTDIR
                         ? ". Choose an nvme_path that this user may write"
                         : "";
  fail(ErrorKind::io, "cannot ", action, " '", path.string(), "': ", std::strerror(error), next);
}

std::string own_process() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return cat("process ", ::getpid(), " on host ", host.data());
}

std::string own_description() {
  std::array<char, 64> start{};
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  std::strftime(start.data(), start.size(), "%Y-%m-%d %H:%M:%S", &parts);
  return cat(own_process(), ", started ", start.data());
}

[[noreturn]] void fail_in_use(const fs::path& guarded, const std::string& holder) {
  if (holder.starts_with(own_process()))
    fail(ErrorKind::io, "'", guarded.string(),
         "' is in use by another store of this process: one file is for one ",
         "rank of one engine. Give each engine of a process another nvme_path");
  fail(ErrorKind::io, "'", guarded.string(), "' is in use by ", holder.empty() ? "another process" : holder,
       ": two runs cannot share it. Wait for that run, end it, or give this one another nvme_path");
}

std::string content_of(int descriptor) {
  std::array<char, 1024> text{};
  const ssize_t got = ::pread(descriptor, text.data(), text.size(), 0);
  std::string line(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  return line.substr(0, line.find_first_of("\n\0"));
}

/// Whether the path still names the open file: its last holder may have removed it while we waited.
bool still_named(int descriptor, const fs::path& path) {
  struct stat open_file {
  }, named{};
  return ::fstat(descriptor, &open_file) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev;
}

}  // namespace

RunLock::RunLock(fs::path path, const fs::path& guarded) : path_(std::move(path)) {
  for (int attempt = 0; attempt < 100; ++attempt)
    if (try_take(guarded)) return;
  fail(ErrorKind::io, "cannot take the lock '", path_.string(),
       "': other processes keep removing it. Give this run another nvme_path");
}

bool RunLock::try_take(const fs::path& guarded) {
  std::error_code error;
  fs::create_directories(path_.parent_path(), error);
  if (error) fail_errno("make the folder", path_.parent_path(), error.value());
  const int descriptor = ::open(path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666);
  if (descriptor < 0 && errno == ENOENT) return false;  // somebody removed the empty folder
  if (descriptor < 0) fail_errno("open", path_, errno);
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    const std::string holder = content_of(descriptor);
    ::close(descriptor);
    if (reason == EINTR) return false;
    if (reason != EWOULDBLOCK) fail_errno("lock", path_, reason);
    fail_in_use(guarded, holder);
  }
  if (!still_named(descriptor, path_)) {
    ::close(descriptor);
    return false;
  }
  descriptor_ = descriptor;
  predecessor_ = content_of(descriptor);
  const std::string text = own_description() + "\n";
  if (::ftruncate(descriptor, 0) != 0 || ::pwrite(descriptor, text.data(), text.size(), 0) < 0) {
    const int reason = errno;
    remove();
    fail_errno("write", path_, reason);
  }
  return true;
}

RunLock::~RunLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void RunLock::remove() noexcept {
  if (descriptor_ < 0) return;
  if (still_named(descriptor_, path_)) ::unlink(path_.c_str());
  ::close(std::exchange(descriptor_, -1));
  ::rmdir(path_.parent_path().c_str());  // stays while other ranks have files in it
}

}  // namespace sherd::offload

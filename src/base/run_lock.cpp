#include "base/run_lock.h"

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
#include "base/log.h"

namespace sherd {
namespace fs = std::filesystem;
namespace {

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

RunLock::RunLock(fs::path path, LockUse use) : path_(std::move(path)), use_(std::move(use)) {
  for (int attempt = 0; attempt < 100; ++attempt)
    if (try_take()) return;
  fail(ErrorKind::io, "cannot take the lock '", path_.string(),
       "': other processes keep removing it. Give this run ", use_.alternative);
}

/// False: to be tried again.
bool RunLock::try_take() {
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
    if (no_locks_here(reason)) return true;
    if (reason != EWOULDBLOCK) fail_errno("lock", path_, reason);
    fail_in_use(holder);
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

bool RunLock::no_locks_here(int reason) const {
  if (use_.required || (reason != ENOSYS && reason != EOPNOTSUPP && reason != ENOLCK)) return false;
  ::unlink(path_.c_str());
  log_warning("the file system of '", use_.guarded.string(), "' has no locks (", std::strerror(reason),
              "): that a second run uses it at the same time would not be noticed");
  return true;
}

void RunLock::fail_in_use(const std::string& holder) const {
  if (holder.starts_with(own_process()))
    fail(ErrorKind::io, "'", use_.guarded.string(), "' is in use by another ", use_.user,
         " of this process: give each of them ", use_.alternative);
  fail(ErrorKind::io, "'", use_.guarded.string(), "' is in use by ",
       holder.empty() ? "another process" : holder,
       ": two runs cannot share it. Wait for that run, end it, or give this one ", use_.alternative);
}

void RunLock::fail_errno(const char* action, const fs::path& path, int error) const {
  const bool refused = error == EACCES || error == EPERM || error == EROFS || error == ENOTDIR;
  fail(ErrorKind::io, "cannot ", action, " '", path.string(), "': ", std::strerror(error),
       refused ? cat(". Choose ", use_.alternative, " that this user may write") : "");
}

bool RunLock::lost() const {
  return held() && !still_named(descriptor_, path_);
}

RunLock::~RunLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void RunLock::remove() noexcept {
  if (descriptor_ < 0) return;
  if (still_named(descriptor_, path_)) ::unlink(path_.c_str());
  ::close(std::exchange(descriptor_, -1));
}

}  // namespace sherd

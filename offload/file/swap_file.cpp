#include "offload/file/swap_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/log.h"

namespace sherd::offload {
namespace fs = std::filesystem;
namespace {

fs::path file_path(const fs::path& folder, int rank, const char* extension) {
  char name[32];
  std::snprintf(name, sizeof name, "rank_%05d.%s", rank, extension);
  return fs::absolute(folder) / "sherd-swap" / name;
}

/// A folder with its parent, so that a mistyped mount point is an error rather than a folder on another disk.
const fs::path& with_parent(const fs::path& folder) {
  fs::path parent = folder.lexically_normal();
  if (!parent.has_filename()) parent = parent.parent_path();  // "drive/"
  parent = parent.parent_path();
  std::error_code unknown;
  if (folder.is_absolute() && !fs::is_directory(parent, unknown))
    fail(ErrorKind::io, "nvme_path '", folder.string(), "': there is no folder '", parent.string(),
         "', and only the last folder of an absolute path is made: correct the path, mount the drive, or "
         "make that folder");
  return folder;
}

/// Some file systems accept the flag and refuse the reads.
bool direct_reads_work(int descriptor) {
  const std::unique_ptr<void, decltype(&std::free)> buffer(std::aligned_alloc(page, page), &std::free);
  return buffer && ::pread(descriptor, buffer.get(), page, 0) >= 0;
}

/// Grows the file to `size`, asking for the blocks where the file system can tell. 0, or an errno.
int grow(int descriptor, std::uint64_t from, std::uint64_t size) {
  for (;;) {
    if (::fallocate(descriptor, 0, static_cast<off_t>(from), static_cast<off_t>(size - from)) == 0) return 0;
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    return ::ftruncate(descriptor, static_cast<off_t>(size)) == 0 ? 0 : errno;
  }
}

}  // namespace

SwapFile::SwapFile(const fs::path& folder, int rank, bool direct)
    : path_(file_path(with_parent(folder), rank, "swap")),
      lock_(file_path(folder, rank, "lock"), {path_, "store", "another nvme_path"}),
      rank_(rank) {
  try {
    open(direct);
  } catch (...) {
    remove();
    throw;
  }
}

void SwapFile::open(bool direct) {
  std::error_code absent;
  const std::uint64_t left = fs::file_size(path_, absent);
  if (!absent)
    log_info("taking over '", path_.string(), "' (", left, " bytes), left by ",
             lock_.predecessor().empty() ? "a run" : lock_.predecessor(),
             ", which ended without removing it");
  // A new file rather than the old one emptied: whoever might still write the old one writes nowhere.
  ::unlink(path_.c_str());
  const int flags = O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC;
  if (direct) file_ = FileDescriptor(::open(path_.c_str(), flags | O_DIRECT, 0600));
  direct_ = static_cast<bool>(file_);
  if (!direct || (!direct_ && errno == EINVAL)) {
    ::unlink(path_.c_str());  // some systems make the file, and then refuse
    file_ = FileDescriptor(::open(path_.c_str(), flags, 0600));
  }
  if (!file_) fail(ErrorKind::io, "cannot create '", path_.string(), "': ", std::strerror(errno));
  if (::ftruncate(file_.get(), page) != 0)  // the guard page
    fail(ErrorKind::io, "cannot resize '", path_.string(), "': ", std::strerror(errno));
  if (direct_ && !direct_reads_work(file_.get()))
    direct_ = ::fcntl(file_.get(), F_SETFL, ::fcntl(file_.get(), F_GETFL) & ~O_DIRECT) != 0;
}

SwapFile::~SwapFile() {
  remove();
}

std::uint64_t SwapFile::extend(const std::string& name, std::uint64_t bytes) {
  if (const std::string what = damage(); !what.empty())
    fail(ErrorKind::io, "'", path_.string(), "' of rank ", rank_, " ", what);
  const std::uint64_t size = size_, begin = size - page;
  require(bytes < (std::uint64_t{1} << 60), "a span of ", bytes, " bytes is too large");
  const std::uint64_t wanted = size + round_up(bytes, page);
  if (wanted == size) return begin;
  if (const int error = grow(file_.get(), size, wanted); error != 0) {
    struct statvfs disk {};
    const std::uint64_t free =
        ::fstatvfs(file_.get(), &disk) == 0 ? std::uint64_t{disk.f_bavail} * disk.f_frsize : 0;
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    // Space that a failed call did allocate goes back.
    const bool restored = ::ftruncate(file_.get(), static_cast<off_t>(size)) == 0;
    fail(ErrorKind::io, "cannot reserve ", wanted - size, " bytes for '", name, "' in '", path_.string(),
         "' (rank ", rank_, ", ", begin, " bytes so far): ", std::strerror(error),
         full ? cat("; ", free, " bytes are free there. Free space, or choose a larger disk with nvme_path")
              : "",
         restored ? "" : ", and the file cannot be cut back");
  }
  size_ = wanted;
  return begin;
}

std::string SwapFile::damage() const {
  const std::uint64_t expected = size_;  // read before the file: another thread may extend it meanwhile
  struct stat now {};
  if (::fstat(file_.get(), &now) != 0) return cat("cannot be examined: ", std::strerror(errno));
  if (now.st_nlink == 0) return "was removed under the run. Resume from the last checkpoint";
  if (static_cast<std::uint64_t>(now.st_size) < expected)
    return cat("was cut off under the run; it should have ", expected,
               " bytes. Resume from the last checkpoint");
  return "";
}

void SwapFile::remove() noexcept {
  if (lock_.held()) ::unlink(path_.c_str());
  lock_.remove();
  ::rmdir(path_.parent_path().c_str());  // stays while other ranks have files in it
}

}  // namespace sherd::offload

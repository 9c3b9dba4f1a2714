#pragma once

#include <filesystem>
#include <string>

namespace sherd {

/// The purpose of a RunLock, in the words of its errors.
struct LockUse {
  std::filesystem::path guarded;  ///< the file or folder that one run at a time may use
  std::string user;               ///< name of its user, "store" say
  std::string alternative;        ///< advice to the second user: "another nvme_path" say
  bool required = true;           ///< an error, not a warning, where the file system has no locks
};

/// A file that one live process at a time holds (flock), so that a second run on the same path is refused and
/// what a dead one left is recognised: the kernel lets go of the lock when the process ends, however that
/// was.
class RunLock {
 public:
  /// Takes the lock, making the file and its folder. Throws Error{io} naming the process that holds it.
  RunLock(std::filesystem::path path, LockUse use);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Who held the lock before and never removed it ("process 17 on host a, started …"); empty for nobody.
  const std::string& predecessor() const { return predecessor_; }
  /// False where the file system has no locks, and after remove().
  bool held() const { return descriptor_ >= 0; }
  /// Whether others removed the file under its holder, so that a second one could take the lock.
  bool lost() const;
  /// Removes the file and lets go.
  void remove() noexcept;

 private:
  bool try_take();
  bool no_locks_here(int reason) const;
  [[noreturn]] void fail_in_use(const std::string& holder) const;
  [[noreturn]] void fail_errno(const char* action, const std::filesystem::path& path, int error) const;

  std::filesystem::path path_;
  LockUse use_;
  std::string predecessor_;
  int descriptor_ = -1;
};

}  // namespace sherd

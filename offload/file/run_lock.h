#pragma once

#include <filesystem>
#include <string>

namespace sherd::offload {

/// A file that one live process at a time holds (flock), so that a second run on the same path is refused and
/// what a dead one left is recognised: the kernel lets go of the lock when the process ends, however that
/// was.
class RunLock {
 public:
  /// Takes the lock, making the file and its folder. Throws Error{io} naming the process that holds it.
  /// `guarded` is the file that the lock is for, as errors name it.
  RunLock(std::filesystem::path path, const std::filesystem::path& guarded);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Who held the lock before and never removed it ("process 17 on host a, started …"); empty for nobody.
  const std::string& predecessor() const { return predecessor_; }
  bool held() const { return descriptor_ >= 0; }
  /// Removes the file, and its folder if nothing else is in it, and lets go.
  void remove() noexcept;

 private:
  bool try_take(const std::filesystem::path& guarded);
  std::filesystem::path path_;
  std::string predecessor_;
  int descriptor_ = -1;
};

}  // namespace sherd::offload

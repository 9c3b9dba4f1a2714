#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/files.h"
#include "base/run_lock.h"

namespace sherd::offload {

/// The unit of direct I/O: offsets, lengths and addresses are multiples of it.
inline constexpr std::size_t page = 4096;

constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// One rank's scratch file and the lock beside it. It ends in a page that no span owns and nobody writes, so
/// that a write cannot bring a file that was cut off under the run back to its length. One thread at a time,
/// but for damage().
class SwapFile {
 public:
  /// Makes folder/sherd-swap/rank_RRRRR.swap, taking over one that a dead process left. Throws Error{io}.
  SwapFile(const std::filesystem::path& folder, int rank, bool direct);
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  int descriptor() const { return file_.get(); }
  const std::filesystem::path& path() const { return path_; }
  int rank() const { return rank_; }
  /// Whether the file is open past the page cache; false where that was not asked for or the file system
  /// refuses.
  bool direct() const { return direct_; }

  /// Appends `bytes` zeros for a span of that name and returns where they begin, a multiple of the page.
  /// Throws Error{io} naming needed and free bytes when the disk is full; the file is then as it was.
  std::uint64_t extend(const std::string& name, std::uint64_t bytes);
  /// Tells of damage that others did to the file ("was removed …"); empty when it is whole. From any thread.
  std::string damage() const;
  /// Removes file and lock, as the destructor does. The descriptor stays open.
  void remove() noexcept;

 private:
  void open(bool direct);
  std::filesystem::path path_;
  RunLock lock_;
  int rank_;
  FileDescriptor file_;
  bool direct_ = false;
  std::atomic<std::uint64_t> size_ = page;  // bytes of the spans and the guard page
};

}  // namespace sherd::offload

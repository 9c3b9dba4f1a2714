#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "offload/io_backend.h"
#include "offload/store.h"

namespace sherd::bench {

/// The traffic to and from a disk; `mixed` reads one half of the file while it writes the other, as an
/// optimizer's step does in the end.
enum class DiskTraffic : std::uint8_t { read, write, mixed };
std::string_view name_of(DiskTraffic traffic);

/// A store's span and whole buffers to and from it in turn, with the next ones always under way.
class StoreTraffic {
 public:
  /// Reserves `bytes` and writes them all: blocks that were never written are quicker to read, and slower to
  /// write. `bytes` must hold at least two of the `buffers` buffers, and is rounded down to an even number of
  /// them. Throws as Store does.
  StoreTraffic(const offload::StoreOptions& options, std::uint64_t bytes, int buffers,
               std::size_t buffer_bytes);

  /// Moves buffers until more(bytes started so far) is false and returns the bytes, all of them done.
  std::uint64_t run(DiskTraffic traffic, const std::function<bool(std::uint64_t)>& more);

  std::uint64_t bytes() const { return span_.bytes(); }
  const offload::Store& store() const { return store_; }
  bool registered() const { return pages_.registered(); }
  std::size_t memory_bytes() const { return buffers_ * buffer_bytes_; }

 private:
  void finish_first();

  device::Ledger ledger_;
  offload::Store store_;
  std::size_t buffers_, buffer_bytes_;
  offload::Pages pages_;  // the buffers, used in turn
  offload::Span span_;
  std::deque<offload::Io> under_way_;  // waited for before the buffers go
};

/// The same traffic over the same bytes of a file without the store: requests of one block straight to a
/// backend, `queue_depth` of them always under way, to and from as much memory in turn (a few blocks would
/// stay in the caches, which makes some disks faster than training will find them).
class RawTraffic {
 public:
  /// Opens the file anew, past the page cache if `options.direct`. Its first `bytes` bytes, a multiple of two
  /// blocks, are read and overwritten. `memory_bytes`, whole blocks, hold at least `queue_depth` of them.
  RawTraffic(std::unique_ptr<offload::IoBackend> backend, const std::string& path, std::uint64_t bytes,
             std::size_t memory_bytes, const offload::StoreOptions& options);
  ~RawTraffic();
  RawTraffic(const RawTraffic&) = delete;
  RawTraffic& operator=(const RawTraffic&) = delete;

  /// Moves `bytes` bytes once over. Throws Error{io} for a request that fails, is cut short, or does not end
  /// within the deadline.
  void run(DiskTraffic traffic);

 private:
  void reap(std::size_t* under_way);

  const std::string path_;
  const std::uint64_t bytes_;
  const std::size_t block_, depth_;
  const double timeout_seconds_;
  int descriptor_ = -1;
  std::byte* memory_ = nullptr;
  std::deque<std::uint64_t> free_;  // blocks of it, those longest unused first
  std::unique_ptr<offload::IoBackend> backend_;
  int registered_ = -1;
};

}  // namespace sherd::bench

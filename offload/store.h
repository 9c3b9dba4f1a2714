#pragma once

// This folder keeps model states on NVMe, asynchronously. It knows no ranks and no modules. docs/offload.md,
// "How the store works", tells what keeps it right.
//
// To change, look at:
// - the interface, and memory that transfers use as it is: store.h
// - how transfers are cut, ordered and watched: queue/ (transfer.h cuts and checks, transfer_queue.h orders,
//   io_thread.h runs)
// - the file, its lock and its space: file/swap_file.h
// - who moves bytes: io_backend.h; uring/ (with a stub/), threads/

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/ledger.h"

namespace sherd::offload {

class Charge;
class IoBackend;
class LentMemory;
struct Extent;
struct Transfer;
class TransferQueue;

/// How a store reads and writes; the names are those of DeepSpeed's `aio` section where it has one.
struct StoreOptions {
  /// Where the file sherd-swap/rank_RRRRR.swap lies. Made where missing; of an absolute path its last folder
  /// alone.
  std::filesystem::path folder;
  int rank = 0;
  std::size_t block_size = 1 << 20;  ///< bytes of one request; a multiple of 4096
  int queue_depth = 8;               ///< requests under way
  bool single_submit = false;        ///< hand requests to the kernel one by one
  bool overlap_events = true;        ///< false: start requests only when none is under way
  int thread_count = 2;              ///< threads that read and write where io_uring is refused
  bool checksums = false;            ///< CRC-32C of every 4 KiB page, verified by every read
  bool direct = true;                ///< past the page cache (O_DIRECT), where the file system can
  /// `automatic` takes io_uring, or says in one line of the log why not and takes threads.
  enum class Backend : std::uint8_t { automatic, io_uring, threads } backend = Backend::automatic;
  double timeout_seconds = 1800;  ///< deadline of every wait
  /// No file, and memory left as it is: spans and buffers are only charged to the ledger, and transfers are
  /// counted and done at once. Meant for steps on a meta device.
  bool dry = false;
};

/// A transfer that has ended well: from when the store began with it.
struct TransferTime {
  bool write = false;
  std::size_t bytes = 0;
  std::chrono::steady_clock::time_point begin, end;
};

/// A named extent of a store's file. Copies name the same bytes.
class Span {
 public:
  Span() = default;  ///< has no bytes
  std::uint64_t bytes() const;
  const std::string& name() const;

 private:
  explicit Span(std::shared_ptr<Extent> extent) : extent_(std::move(extent)) {}
  std::shared_ptr<Extent> extent_;
  friend class Store;
};

/// A transfer under way, of which somebody waits for the end. One thread at a time.
class Io {
 public:
  Io() = default;  ///< already done
  Io(Io&&) noexcept = default;
  /// Waits for the transfer that was held before, as the destructor does.
  Io& operator=(Io&& other) noexcept;
  /// Waits until the caller's memory is free again, at most the store's deadline. An error found here is not
  /// lost: it has broken the store.
  ~Io();

  /// True when wait() would not block.
  bool ready() const;
  /// Returns when the bytes have arrived (read) or the memory may be reused (write). Throws Error{io} naming
  /// the file, the rank, the span, the offset and the cause, also when the deadline passes; Error{data} for a
  /// page whose checksum is wrong.
  void wait();

 private:
  explicit Io(std::shared_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}
  std::shared_ptr<Transfer> transfer_;
  friend class Store;
  friend class DeferredRead;
};

/// A read that was ordered among the transfers before anybody has memory for it; see Store::defer_read(). One
/// thread at a time. When it goes without start(), nothing is read.
class DeferredRead {
 public:
  DeferredRead() = default;  ///< reads nothing
  DeferredRead(DeferredRead&&) noexcept = default;
  ~DeferredRead();

  /// Reads into `to`, which has room for all bytes; once. Otherwise it is as Store::read().
  Io start(void* to);

 private:
  explicit DeferredRead(std::shared_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}
  std::shared_ptr<Transfer> transfer_;
  friend class Store;
};

/// Memory that a store transfers without a copy while this lives; see Store::lend().
class Loan {
 public:
  Loan() = default;  ///< lends nothing

 private:
  explicit Loan(std::shared_ptr<LentMemory> memory) : memory_(std::move(memory)) {}
  std::shared_ptr<LentMemory> memory_;  // shared with transfers
  friend class Store;
};

/// Zeroed host memory on page boundaries, which a store transfers without a copy; see Store::pages().
class Pages {
 public:
  Pages() = default;  ///< none
  std::byte* data() const { return data_; }
  /// Whether the kernel took them as registered memory.
  bool registered() const { return registered_; }

 private:
  std::shared_ptr<LentMemory> memory_;  // shared with transfers
  std::byte* data_ = nullptr;
  bool registered_ = false;
  friend class Store;
};

/// One rank's bytes on NVMe: named spans of one file, read and written asynchronously. Scratch space: the
/// file goes with the store, and one that a dead run left is taken over.
///
/// Transfers run on a thread of the store, without help from the caller: cut into requests of `block_size`
/// bytes, at most `queue_depth` of them under way, the rest queued. Transfers whose ranges share a page run
/// in the order of the calls unless both only read, so a read sees every earlier write. Any address, offset
/// and length will do, and no byte outside of the given range is touched; whole pages of memory that is a
/// store's pages() or lent travel without a copy, everything else through buffers of the store. Until the Io
/// is done the memory must live, and what is written must not change.
///
/// The first transfer that fails or misses its deadline breaks the store: it may no longer hold what was
/// written. All unfinished transfers end with that error and later calls throw it. At a deadline the kernel
/// may still hold memory; that is only ever memory of the store, its pages() or lent, which stays
/// allocated until it is given back.
///
/// Thread-safe. Handles (Span, Io, Pages) may outlive the store; transfers may not be started then.
class Store {
 public:
  /// Makes the file. Throws Error{config} for options that make no sense, Error{io} where the folder cannot
  /// be used or where a live process uses the same file. The ledger must outlive the store and its pages.
  Store(const StoreOptions& options, device::Ledger& ledger);
  /// The same over a given backend, whatever options.backend says.
  Store(const StoreOptions& options, device::Ledger& ledger, std::unique_ptr<IoBackend> backend);
  /// Waits for unfinished transfers, at most the deadline, and removes the file.
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// A new span of zeros. Charges `bytes` to the NVMe tier until the store goes, and checksums to the host's
  /// (workspace). Throws Error{io} when the file system has no room, naming what is needed and what is free,
  /// and Error{memory} at the ledger's limit.
  Span reserve(std::string name, std::uint64_t bytes, device::Category category);

  /// Starts to copy bytes [offset, offset + bytes) of the span to memory. Throws Error{usage} for a range
  /// outside of the span, and the error that broke the store.
  Io read(const Span& span, std::uint64_t offset, void* to, std::size_t bytes);
  /// The bytes [offset, offset + bytes) of the span as they are now, after all writes that were started
  /// before, to be read later: writes to these pages that are started meanwhile wait until they have been
  /// read or the DeferredRead goes, at most the deadline. What a checkpoint takes from a store while training
  /// goes on is read so: without a copy, in no more memory than a buffer. Throws as read(); the result must
  /// not outlive the store.
  DeferredRead defer_read(const Span& span, std::uint64_t offset, std::size_t bytes);
  /// Starts to copy memory over bytes [offset, offset + bytes) of the span.
  Io write(const Span& span, std::uint64_t offset, const void* from, std::size_t bytes);

  /// Whole pages for `bytes` bytes, until the result goes and transfers of them have ended; they may outlive
  /// the store. Charges them to the host tier under `category`. They are registered with the kernel where it
  /// allows that; a refusal (memory-lock limits) costs a little speed and is logged once. Throws
  /// Error{memory} at the ledger's limit or when the system has no more.
  Pages pages(std::size_t bytes, device::Category category);
  /// Lets transfers use the storage directly, as they do pages(), until the Loan goes and they have ended.
  /// Requests that a failure left with the device keep the storage from being freed, not from being used:
  /// after the store's error its content may still change. Only pages on page boundaries travel without a
  /// copy. Throws Error{usage} for storage that is lent already.
  Loan lend(const device::Storage& storage);

  /// `observer` is told of transfers from here on, on the store's thread, and must not call the store; null:
  /// nobody is. After the call the one before is told nothing more.
  void set_observer(std::function<void(const TransferTime&)> observer);

  /// Payload of finished requests; what alignment adds is not counted.
  std::uint64_t bytes_read() const;
  std::uint64_t bytes_written() const;
  /// The part of transfers' payload that was copied through buffers of the store.
  std::uint64_t bytes_bounced() const;

  /// How bytes travel: "io_uring" or "threads", with ", buffered" where they pass through the page cache; or
  /// "dry".
  const std::string& backend_name() const;
  /// The file's path; empty when dry.
  const std::filesystem::path& path() const;

  /// Bytes that a store charges to the host tier (workspace) for its own buffers.
  static std::uint64_t host_bytes(const StoreOptions& options);

 private:
  void check_range(const Span& span, std::uint64_t offset, std::size_t bytes) const;
  Io start(const Span& span, bool write, std::uint64_t offset, std::byte* memory, std::size_t bytes);
  device::Ledger& ledger_;
  const bool checksums_;
  std::mutex mutex_;
  std::vector<Charge> charges_;           // guarded by mutex_
  std::shared_ptr<TransferQueue> queue_;  // null when dry
  std::atomic<std::uint64_t> dry_read_ = 0, dry_written_ = 0;
};

}  // namespace sherd::offload

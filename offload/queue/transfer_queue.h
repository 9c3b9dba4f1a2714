#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "offload/file/host_memory.h"
#include "offload/file/swap_file.h"
#include "offload/io_backend.h"
#include "offload/queue/transfer.h"
#include "offload/store.h"

namespace sherd::offload {

/// Memory parts of which the kernel may be given.
class LentMemory {
 public:
  virtual ~LentMemory() = default;
  /// Keeps [from, from + bytes) as it is until the result goes; null when the range is not one that may be
  /// given.
  virtual std::shared_ptr<void> hold(const std::byte* from, std::size_t bytes) = 0;
};

/// The part of a store that its thread, its transfers and its pools share: the file, the order of the
/// transfers, the first error. Whoever holds a part of it may outlive the store.
///
/// All transfers are in `unfinished_`, those that nothing blocks also in `ready_` until the thread takes
/// them.
class TransferQueue : public std::enable_shared_from_this<TransferQueue> {
 public:
  /// Starts the store's thread. A null backend stands for make_backend().
  static std::shared_ptr<TransferQueue> start(const StoreOptions& options,
                                              std::unique_ptr<IoBackend> backend);
  TransferQueue(const StoreOptions& options, std::unique_ptr<IoBackend> backend);

  std::shared_ptr<Extent> extend(std::string name, std::uint64_t bytes);
  std::shared_ptr<Transfer> add(std::shared_ptr<Extent> extent, bool write, std::uint64_t offset,
                                std::byte* memory, std::size_t bytes);
  /// A read in the order of the calls, which does not run before it is given memory.
  std::shared_ptr<Transfer> defer_read(std::shared_ptr<Extent> extent, std::uint64_t offset,
                                       std::size_t bytes);
  void start_deferred(const std::shared_ptr<Transfer>& transfer, std::byte* memory);
  /// Ends it unread.
  void cancel_deferred(const std::shared_ptr<Transfer>& transfer) noexcept;
  /// Waits until the transfer is done, at most the store's deadline; then breaks the store. Throws its
  /// failure.
  void wait(Transfer& transfer);
  /// Throws the error that broke the store.
  void check();

  /// Does what Store::set_observer() says.
  void set_observer(std::function<void(const TransferTime&)> observer);

  /// Lets transfers use the memory directly while `owner` lives. Returns whether the kernel registered it.
  bool lend(std::byte* data, std::size_t bytes, std::weak_ptr<LentMemory> owner);
  void take_back(std::byte* data) noexcept;

  /// Ends every transfer and the thread, and removes the file. Returns at the deadline at the latest.
  void shut_down() noexcept;
  /// The store has gone without its thread, which the kernel never answered: its bytes stay charged.
  bool abandoned() const { return abandoned_; }

  // For the store's thread.
  /// The next transfer to be cut into requests; null when there is none.
  std::shared_ptr<Transfer> take_ready();
  /// All requests of the transfer have ended well.
  void finish(const std::shared_ptr<Transfer>& transfer);
  /// Breaks the store: ends all transfers with this error. `stuck`: requests under way may never end.
  void fail(ErrorKind kind, const std::string& message, bool stuck = false);
  /// Runs `copy` unless the transfer is done, which it does not become meanwhile. False when it was.
  bool copy_unless_done(const Transfer& transfer, const std::function<void()>& copy);
  bool stopping() const { return stopping_; }

  const StoreOptions options;
  SwapFile file;
  std::unique_ptr<IoBackend> backend;
  HostMemory bounce;
  int bounce_handle = -1;
  std::string backend_name;
  std::atomic<std::uint64_t> bytes_read = 0, bytes_written = 0, bytes_bounced = 0;

 private:
  struct Lent {
    std::size_t bytes = 0;
    std::weak_ptr<LentMemory> owner;
    int handle = -1;
  };
  using Transfers = std::vector<std::shared_ptr<Transfer>>;
  std::shared_ptr<LentMemory> find_lease(Transfer& transfer);
  void block_on_earlier(const std::shared_ptr<Transfer>& transfer);
  void unblock_followers(Transfer& transfer);
  Transfers miss_deadline(std::unique_lock<std::mutex>& lock, const std::string& what);
  /// Returns the transfers that it ended. The caller lets them go once the lock is free: with a transfer its
  /// memory may go, which takes the lock.
  Transfers break_locked(Failure failure);

  std::mutex mutex_;
  std::condition_variable changed_;  // a transfer is done, a copy has ended, the thread has ended
  Transfers unfinished_;             // in the order of the calls
  std::deque<std::shared_ptr<Transfer>> ready_;
  std::map<const std::byte*, Lent> lent_;  // by address
  std::optional<Failure> broken_;
  std::chrono::steady_clock::time_point moved_{};  // when a transfer ended last
  std::function<void(const TransferTime&)> observer_;
  bool copying_ = false, stuck_ = false, thread_ended_ = false, refusal_logged_ = false;
  std::atomic<bool> stopping_ = false, abandoned_ = false;
  std::thread thread_;
};

/// Slots of the store's own transfer buffers, and bytes of each.
int bounce_slots(const StoreOptions& options);
std::size_t bounce_slot_bytes(const StoreOptions& options);

}  // namespace sherd::offload

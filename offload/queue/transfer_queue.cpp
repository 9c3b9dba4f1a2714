#include "offload/queue/transfer_queue.h"

#include <algorithm>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/threads.h"
#include "base/waits.h"
#include "device/trace_range.h"
#include "offload/queue/io_thread.h"

namespace sherd::offload {

std::unique_ptr<IoBackend> make_backend(const StoreOptions& options, bool direct) {
  using Backend = StoreOptions::Backend;
  // Through the page cache io_uring only hands requests to threads of the kernel's own.
  if (options.backend == Backend::threads || (options.backend == Backend::automatic && !direct))
    return make_thread_backend(options);
  std::string why;
  if (auto backend = make_uring_backend(options, &why)) return backend;
  if (options.backend == Backend::io_uring)
    fail(ErrorKind::io, "io_uring was asked for and cannot be used: ", why);
  log_info("io_uring cannot be used (", why, "): reading and writing with ",
           counted(options.thread_count, "thread"), " instead");
  return make_thread_backend(options);
}

namespace {

/// Whether two transfers touch a page in common and may not run at once.
bool conflict(const Transfer& a, const Transfer& b) {
  if (a.extent != b.extent || (!a.write && !b.write)) return false;
  return a.offset / page * page < round_up(b.offset + b.bytes, page) &&
         b.offset / page * page < round_up(a.offset + a.bytes, page);
}

std::unique_ptr<IoBackend> backend_for(const StoreOptions& options, const SwapFile& file,
                                       std::unique_ptr<IoBackend> given) {
  if (options.direct && !file.direct())
    log_info("the file system of '", file.path().string(),
             "' refuses O_DIRECT: transfers pass through the page cache");
  return given ? std::move(given) : make_backend(options, file.direct());
}

}  // namespace

int bounce_slots(const StoreOptions& options) {
  return std::min(options.queue_depth, 16);
}

std::size_t bounce_slot_bytes(const StoreOptions& options) {
  return std::min<std::size_t>(options.block_size, std::size_t{1} << 20);
}

std::shared_ptr<TransferQueue> TransferQueue::start(const StoreOptions& options,
                                                    std::unique_ptr<IoBackend> backend) {
  auto queue = std::make_shared<TransferQueue>(options, std::move(backend));
  queue->thread_ = std::thread(own_thread([queue] {
    const ThreadRank rank(queue->options.rank);
    IoThread(*queue).run();
    std::lock_guard lock(queue->mutex_);
    queue->thread_ended_ = true;
    queue->changed_.notify_all();
  }));
  return queue;
}

TransferQueue::TransferQueue(const StoreOptions& given, std::unique_ptr<IoBackend> given_backend)
    : options(given),
      file(given.folder, given.rank, given.direct),
      backend(backend_for(given, file, std::move(given_backend))),
      bounce(static_cast<std::size_t>(bounce_slots(given)) * bounce_slot_bytes(given)),
      backend_name(backend->name() + (file.direct() ? "" : ", buffered")) {
  backend->attach(file.descriptor());
  std::string ignored;
  bounce_handle = backend->register_memory({bounce.data(), bounce.bytes()}, &ignored);
}

std::shared_ptr<Extent> TransferQueue::extend(std::string name, std::uint64_t bytes) {
  auto extent = std::make_shared<Extent>(Extent{.owner = this, .name = std::move(name), .bytes = bytes});
  if (options.checksums) extent->checksums = checksums_of_zeros(bytes);
  std::lock_guard lock(mutex_);
  if (broken_) broken_->raise();
  extent->begin = file.extend(extent->name, bytes);
  return extent;
}

std::shared_ptr<Transfer> TransferQueue::add(std::shared_ptr<Extent> extent, bool write, std::uint64_t offset,
                                             std::byte* memory, std::size_t bytes) {
  auto transfer = std::make_shared<Transfer>(shared_from_this(), std::move(extent), write, offset, bytes);
  transfer->memory = memory;
  std::shared_ptr<LentMemory> owner;  // to go, if it is the last, when the lock is free: it takes itself back
  {
    std::lock_guard lock(mutex_);
    if (broken_) broken_->raise();
    owner = find_lease(*transfer);
    block_on_earlier(transfer);
    unfinished_.push_back(transfer);
    if (transfer->blockers > 0) return transfer;
    ready_.push_back(transfer);
  }
  backend->wake();
  return transfer;
}

std::shared_ptr<LentMemory> TransferQueue::find_lease(Transfer& transfer) {
  auto after = lent_.upper_bound(transfer.memory);
  if (after == lent_.begin()) return nullptr;
  const auto& [data, lent] = *std::prev(after);
  if (transfer.memory + transfer.bytes > data + lent.bytes) return nullptr;
  std::shared_ptr<LentMemory> owner = lent.owner.lock();
  if (owner) transfer.lease = owner->hold(transfer.memory, transfer.bytes);
  if (transfer.lease) transfer.registered = lent.handle;
  return owner;
}

void TransferQueue::block_on_earlier(const std::shared_ptr<Transfer>& transfer) {
  for (const auto& earlier : unfinished_)
    if (conflict(*earlier, *transfer)) {
      earlier->followers.push_back(transfer);
      ++transfer->blockers;
    }
}

void TransferQueue::unblock_followers(Transfer& transfer) {
  for (auto& follower : transfer.followers)
    if (--follower->blockers == 0 && !follower->deferred) ready_.push_back(std::move(follower));
  transfer.followers.clear();
}

std::shared_ptr<Transfer> TransferQueue::defer_read(std::shared_ptr<Extent> extent, std::uint64_t offset,
                                                    std::size_t bytes) {
  auto transfer = std::make_shared<Transfer>(shared_from_this(), std::move(extent), false, offset, bytes);
  transfer->deferred = true;
  std::lock_guard lock(mutex_);
  if (broken_) broken_->raise();
  block_on_earlier(transfer);
  unfinished_.push_back(transfer);
  return transfer;
}

void TransferQueue::start_deferred(const std::shared_ptr<Transfer>& transfer, std::byte* memory) {
  std::shared_ptr<LentMemory> owner;  // as in add()
  {
    std::lock_guard lock(mutex_);
    if (broken_) broken_->raise();
    transfer->memory = memory;
    owner = find_lease(*transfer);
    transfer->deferred = false;
    if (transfer->blockers > 0) return;
    ready_.push_back(transfer);
  }
  backend->wake();
}

void TransferQueue::cancel_deferred(const std::shared_ptr<Transfer>& transfer) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (transfer->done) return;  // with the store
    std::erase(unfinished_, transfer);
    unblock_followers(*transfer);
    transfer->done = true;
    changed_.notify_all();
  }
  backend->wake();
}

std::shared_ptr<Transfer> TransferQueue::take_ready() {
  std::lock_guard lock(mutex_);
  if (ready_.empty()) return nullptr;
  auto transfer = std::move(ready_.front());
  ready_.pop_front();
  if (observer_) transfer->begun = std::chrono::steady_clock::now();
  return transfer;
}

void TransferQueue::finish(const std::shared_ptr<Transfer>& transfer) {
  // A read of a file that was cut off meanwhile may have found a hole, and a write have gone nowhere.
  if (const std::string what = file.damage(); !what.empty())
    return fail(ErrorKind::io, cat("'", file.path().string(), "' of rank ", options.rank, " ", what));
  std::lock_guard lock(mutex_);
  if (transfer->done) return;
  std::erase(unfinished_, transfer);
  moved_ = std::chrono::steady_clock::now();
  unblock_followers(*transfer);
  if (observer_ && transfer->begun.time_since_epoch().count() > 0)
    observer_({transfer->write, transfer->bytes, transfer->begun, std::chrono::steady_clock::now()});
  transfer->done = true;
  changed_.notify_all();
}

void TransferQueue::fail(ErrorKind kind, const std::string& message, bool stuck) {
  Transfers ended;
  std::lock_guard lock(mutex_);
  stuck_ = stuck_ || stuck;
  ended = break_locked({kind, message});
}

TransferQueue::Transfers TransferQueue::break_locked(Failure failure) {
  if (!broken_) broken_ = std::move(failure);
  for (const auto& transfer : unfinished_) {
    transfer->followers.clear();
    transfer->failure = *broken_;
    transfer->done = true;
  }
  ready_.clear();
  changed_.notify_all();
  return std::exchange(unfinished_, {});
}

bool TransferQueue::copy_unless_done(const Transfer& transfer, const std::function<void()>& copy) {
  {
    std::lock_guard lock(mutex_);
    if (transfer.done) return false;
    copying_ = true;
  }
  copy();
  std::lock_guard lock(mutex_);
  copying_ = false;
  changed_.notify_all();
  return !transfer.done;
}

TransferQueue::Transfers TransferQueue::miss_deadline(std::unique_lock<std::mutex>& lock,
                                                      const std::string& what) {
  stuck_ = true;
  // A copy to or from the caller's memory is over soon.
  changed_.wait(lock, [&] { return !copying_; });
  return break_locked(
      {ErrorKind::io,
       cat(what, " '", file.path().string(), "' (rank ", options.rank, ") did not end within ",
           options.timeout_seconds, " s: the device is stuck or very slow. Check it and resume from the ",
           "last checkpoint, or raise parallel.timeout_seconds")});
}

void TransferQueue::set_observer(std::function<void(const TransferTime&)> observer) {
  std::lock_guard lock(mutex_);
  observer_ = std::move(observer);
}

void TransferQueue::wait(Transfer& transfer) {
  if (!transfer.done) {
    const device::TraceRange range(transfer.write ? "wait for write of" : "wait for read of",
                                   transfer.extent->name);
    const WaitScope waits(WaitFor::storage);
    const auto timeout = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(options.timeout_seconds));
    auto until = std::chrono::steady_clock::now() + timeout;
    Transfers ended;
    std::unique_lock lock(mutex_);
    while (!changed_.wait_until(lock, until, [&] { return transfer.done.load(); })) {
      // Behind others, as behind a checkpoint's reads, it is no slower than they are.
      const bool behind = transfer.blockers > 0;
      if (behind && moved_ + timeout > until) {
        until = moved_ + timeout;
        continue;
      }
      ended = miss_deadline(
          lock, cat(transfer.write ? "writing " : "reading ", transfer.bytes, " bytes at offset ",
                    transfer.offset, " of '", transfer.extent->name, "'",
                    behind ? ", behind earlier transfers and reads of a checkpoint under way," : "", " in"));
      break;
    }
  }
  if (transfer.failure) transfer.failure->raise();
}

void TransferQueue::check() {
  std::lock_guard lock(mutex_);
  if (broken_) broken_->raise();
}

bool TransferQueue::lend(std::byte* data, std::size_t bytes, std::weak_ptr<LentMemory> owner) {
  {
    std::lock_guard lock(mutex_);
    require(lent_.emplace(data, Lent{bytes, std::move(owner)}).second,
            "this memory is lent to the store already");
  }
  std::string why;
  const int handle = backend->register_memory({data, bytes}, &why);
  std::lock_guard lock(mutex_);
  lent_[data].handle = handle;
  if (handle < 0 && !why.empty() && !std::exchange(refusal_logged_, true))
    log_info("the kernel does not register transfer buffers (", why,
             "): plain ones are used, a little slower");
  return handle >= 0;
}

void TransferQueue::take_back(std::byte* data) noexcept {
  int handle = -1;
  {
    std::lock_guard lock(mutex_);
    const auto it = lent_.find(data);
    if (it == lent_.end()) return;
    handle = it->second.handle;
    lent_.erase(it);
  }
  if (handle >= 0) backend->unregister_memory(handle);
}

void TransferQueue::shut_down() noexcept {
  const auto limit = [&](double seconds) { return Deadline::after_seconds(seconds).at(); };
  Transfers ended_late;
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, limit(options.timeout_seconds), [&] { return unfinished_.empty(); }))
    ended_late = miss_deadline(lock, "a transfer in");
  stopping_ = true;
  backend->wake();
  // Who has waited for the deadline once does not wait for it again.
  const double patience = stuck_ ? std::min(options.timeout_seconds, 1.0) : options.timeout_seconds;
  const bool ended = changed_.wait_until(lock, limit(patience), [&] { return thread_ended_; });
  abandoned_ = !ended;
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();  // it keeps the memory that the kernel still holds
    log_warning("leaving transfers behind that the device never ended ('", file.path().string(), "')");
  }
  file.remove();
}

}  // namespace sherd::offload

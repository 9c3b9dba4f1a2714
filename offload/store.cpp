#include "offload/store.h"

#include <utility>

#include "base/error.h"
#include "offload/file/host_memory.h"
#include "offload/file/swap_file.h"
#include "offload/io_backend.h"
#include "offload/queue/transfer_queue.h"

namespace sherd::offload {
namespace {

using device::Category;
using device::Tier;

/// A storage that somebody lent, while a Loan or transfers hold it.
class LentStorage final : public LentMemory, public std::enable_shared_from_this<LentStorage> {
 public:
  LentStorage(std::shared_ptr<TransferQueue> queue, device::Storage storage)
      : queue_(std::move(queue)), storage_(std::move(storage)) {}
  ~LentStorage() override {
    if (lent_) queue_->take_back(storage_.data());
  }
  void lend() {
    queue_->lend(storage_.data(), storage_.bytes(), weak_from_this());
    lent_ = true;
  }
  std::shared_ptr<void> hold(const std::byte*, std::size_t) override { return shared_from_this(); }

 private:
  std::shared_ptr<TransferQueue> queue_;
  device::Storage storage_;
  bool lent_ = false;
};

/// A store's pages(), while somebody or transfers hold them.
class OwnPages final : public LentMemory, public std::enable_shared_from_this<OwnPages> {
 public:
  OwnPages(std::shared_ptr<TransferQueue> queue, device::Ledger& ledger, Category category, std::size_t bytes)
      : queue_(std::move(queue)), charge_(ledger, Tier::host, category, bytes), memory_(bytes) {}
  ~OwnPages() override {
    if (!queue_) return;  // of a dry store
    queue_->take_back(memory_.data());
    if (queue_->abandoned()) charge_.keep();  // its request may have held us longer than the ledger lives
  }
  std::byte* data() const { return memory_.data(); }
  bool lend() { return queue_ && queue_->lend(memory_.data(), memory_.bytes(), weak_from_this()); }
  std::shared_ptr<void> hold(const std::byte*, std::size_t) override { return shared_from_this(); }

 private:
  std::shared_ptr<TransferQueue> queue_;
  Charge charge_;
  HostMemory memory_;
};

const StoreOptions& validated(const StoreOptions& options) {
  const auto check = [](bool good, const auto&... message) {
    if (!good) fail(ErrorKind::config, message...);
  };
  check(!options.folder.empty(), "a store needs a folder (nvme_path)");
  check(options.rank >= 0, "a store's rank must not be negative, and is ", options.rank);
  check(options.block_size >= page && options.block_size % page == 0 && options.block_size <= (1u << 30),
        "aio.block_size must be a multiple of ", page, " bytes up to 1 GiB, and is ", options.block_size);
  check(options.queue_depth >= 1 && options.queue_depth <= 4096, "aio.queue_depth must be 1 to 4096, and is ",
        options.queue_depth);
  check(options.thread_count >= 1 && options.thread_count <= 256,
        "aio.thread_count must be 1 to 256, and is ", options.thread_count);
  check(options.timeout_seconds > 0, "a store's timeout must be positive, and is ", options.timeout_seconds,
        " s");
  return options;
}

}  // namespace

std::uint64_t Span::bytes() const {
  return extent_ ? extent_->bytes : 0;
}
const std::string& Span::name() const {
  static const std::string none;
  return extent_ ? extent_->name : none;
}

Io& Io::operator=(Io&& other) noexcept {
  Io before(std::move(*this));
  transfer_ = std::move(other.transfer_);
  return *this;
}

Io::~Io() {
  try {
    wait();
  } catch (const Error&) {  // the store keeps it
  }
}

bool Io::ready() const {
  return !transfer_ || transfer_->done;
}

void Io::wait() {
  if (transfer_) transfer_->queue->wait(*transfer_);
}

Store::Store(const StoreOptions& options, device::Ledger& ledger) : Store(options, ledger, nullptr) {}

Store::Store(const StoreOptions& options, device::Ledger& ledger, std::unique_ptr<IoBackend> backend)
    : ledger_(ledger), checksums_(validated(options).checksums) {
  charges_.emplace_back(ledger, Tier::host, Category::workspace, host_bytes(options));
  if (!options.dry) queue_ = TransferQueue::start(options, std::move(backend));
}

Store::~Store() {
  if (queue_) queue_->shut_down();
}

Span Store::reserve(std::string name, std::uint64_t bytes, Category category) {
  Charge on_disk(ledger_, Tier::nvme, category, bytes);
  Charge sums(ledger_, Tier::host, Category::workspace, checksums_ ? checksum_bytes(bytes) : 0);
  Span span(queue_ ? queue_->extend(std::move(name), bytes)
                   : std::make_shared<Extent>(Extent{.name = std::move(name), .bytes = bytes}));
  std::lock_guard lock(mutex_);
  charges_.push_back(std::move(on_disk));
  charges_.push_back(std::move(sums));
  return span;
}

DeferredRead::~DeferredRead() {
  if (transfer_) transfer_->queue->cancel_deferred(transfer_);
}

Io DeferredRead::start(void* to) {
  const auto transfer = std::move(transfer_);
  if (!transfer) return {};
  transfer->queue->start_deferred(transfer, static_cast<std::byte*>(to));
  return Io(transfer);
}

DeferredRead Store::defer_read(const Span& span, std::uint64_t offset, std::size_t bytes) {
  check_range(span, offset, bytes);
  if (!queue_ || bytes == 0) return {};
  return DeferredRead(queue_->defer_read(span.extent_, offset, bytes));
}

void Store::check_range(const Span& span, std::uint64_t offset, std::size_t bytes) const {
  require(!span.extent_ || span.extent_->owner == queue_.get(), "'", span.name(),
          "' is a span of another store");
  require(offset <= span.bytes() && bytes <= span.bytes() - offset, "bytes ", offset, " to ", offset, " + ",
          bytes, " lie outside of '", span.name(), "', which has ", span.bytes());
}

Io Store::start(const Span& span, bool write, std::uint64_t offset, std::byte* memory, std::size_t bytes) {
  check_range(span, offset, bytes);
  if (!queue_) {
    (write ? dry_written_ : dry_read_) += bytes;
    return {};
  }
  queue_->check();
  if (bytes == 0) return {};
  require(memory != nullptr, "a transfer of '", span.name(), "' has no memory");
  return Io(queue_->add(span.extent_, write, offset, memory, bytes));
}

Io Store::read(const Span& span, std::uint64_t offset, void* to, std::size_t bytes) {
  return start(span, false, offset, static_cast<std::byte*>(to), bytes);
}

Io Store::write(const Span& span, std::uint64_t offset, const void* from, std::size_t bytes) {
  // Writes only read it; requests have one type of pointer.
  return start(span, true, offset, static_cast<std::byte*>(const_cast<void*>(from)), bytes);
}

Pages Store::pages(std::size_t bytes, Category category) {
  const auto memory = std::make_shared<OwnPages>(queue_, ledger_, category, round_up(bytes, page));
  Pages out;
  out.registered_ = memory->lend();
  out.data_ = memory->data();
  out.memory_ = memory;
  return out;
}

Loan Store::lend(const device::Storage& storage) {
  if (!queue_ || storage.bytes() == 0) return {};
  auto memory = std::make_shared<LentStorage>(queue_, storage);
  memory->lend();
  return Loan(std::move(memory));
}

void Store::set_observer(std::function<void(const TransferTime&)> observer) {
  if (queue_) queue_->set_observer(std::move(observer));
}

std::uint64_t Store::bytes_read() const {
  return queue_ ? queue_->bytes_read.load() : dry_read_.load();
}
std::uint64_t Store::bytes_written() const {
  return queue_ ? queue_->bytes_written.load() : dry_written_.load();
}
std::uint64_t Store::bytes_bounced() const {
  return queue_ ? queue_->bytes_bounced.load() : 0;
}
const std::string& Store::backend_name() const {
  static const std::string dry = "dry";
  return queue_ ? queue_->backend_name : dry;
}
const std::filesystem::path& Store::path() const {
  static const std::filesystem::path none;
  return queue_ ? queue_->file.path() : none;
}

std::uint64_t Store::host_bytes(const StoreOptions& options) {
  return static_cast<std::uint64_t>(bounce_slots(options)) * bounce_slot_bytes(options);
}

}  // namespace sherd::offload

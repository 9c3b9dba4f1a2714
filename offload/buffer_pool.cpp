#include "offload/buffer_pool.h"

#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "offload/file/host_memory.h"
#include "offload/file/swap_file.h"
#include "offload/queue/transfer_queue.h"

namespace sherd::offload {
using device::Category;
using device::Tier;

/// The memory that a pool, its buffers and the transfers of it share.
class PoolMemory final : public LentMemory, public std::enable_shared_from_this<PoolMemory> {
 public:
  PoolMemory(device::Ledger& ledger, int count, std::size_t bytes, Category category)
      : charge_(ledger, Tier::host, category, BufferPool::host_bytes(count, bytes)),
        slab_(BufferPool::host_bytes(count, bytes)),
        bytes_(bytes),
        stride_(round_up(bytes, page)),
        leases_(static_cast<std::size_t>(count)) {
    for (std::size_t i = leases_.size(); i-- > 0;) free_.push_back(i);
  }
  ~PoolMemory() override {
    for (const auto& queue : queues_) {
      queue->take_back(slab_.data());
      if (queue->abandoned()) charge_.keep();  // its request may have held us longer than the ledger lives
    }
  }

  void lend_to(const std::shared_ptr<TransferQueue>& queue) {
    if (!queue) return;  // a dry store
    const bool taken = queue->lend(slab_.data(), slab_.bytes(), weak_from_this());
    std::lock_guard lock(mutex_);
    registered_ = taken && (queues_.empty() || registered_);
    queues_.push_back(queue);
  }

  std::shared_ptr<void> hold(const std::byte* from, std::size_t bytes) override {
    const std::size_t at = static_cast<std::size_t>(from - slab_.data()), index = at / stride_;
    if (at % stride_ + bytes > stride_) return nullptr;
    std::lock_guard lock(mutex_);
    return leases_[index].lock();
  }

  std::shared_ptr<BufferLease> try_lease() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    const std::size_t index = free_.back();
    auto lease = std::make_shared<PoolLease>(shared_from_this(), index);
    free_.pop_back();
    leases_[index] = lease;
    return lease;
  }

  int count() const { return static_cast<int>(leases_.size()); }
  std::size_t bytes() const { return bytes_; }
  bool registered() {
    std::lock_guard lock(mutex_);
    return registered_;
  }

 private:
  struct PoolLease final : BufferLease {
    PoolLease(std::shared_ptr<PoolMemory> p, std::size_t i) : pool(std::move(p)), index(i) {
      data = pool->slab_.data() + index * pool->stride_, bytes = pool->bytes_;
    }
    ~PoolLease() override {
      std::lock_guard lock(pool->mutex_);
      pool->free_.push_back(index);
    }
    std::shared_ptr<PoolMemory> pool;
    std::size_t index;
  };

  Charge charge_;
  HostMemory slab_;
  std::size_t bytes_, stride_;
  std::mutex mutex_;  // may be taken under a queue's
  // Guarded by mutex_:
  std::vector<std::shared_ptr<TransferQueue>> queues_;  // the stores' that transfer from here
  bool registered_ = false;
  std::vector<std::size_t> free_;
  std::vector<std::weak_ptr<BufferLease>> leases_;  // by buffer
};

BufferPool::BufferPool(Store& store, device::Ledger& ledger, int count, std::size_t bytes,
                       Category category) {
  require(count > 0 && bytes > 0, "a pool of ", count, " buffers of ", bytes, " bytes");
  memory_ = std::make_shared<PoolMemory>(ledger, count, bytes, category);
  lend_to(store);
}

BufferPool::~BufferPool() = default;

void BufferPool::lend_to(Store& store) {
  memory_->lend_to(store.queue_);
}

Buffer BufferPool::try_acquire() {
  return Buffer(memory_->try_lease());
}

int BufferPool::count() const {
  return memory_->count();
}
std::size_t BufferPool::bytes() const {
  return memory_->bytes();
}
bool BufferPool::registered() const {
  return memory_->registered();
}

std::uint64_t BufferPool::host_bytes(int count, std::size_t bytes) {
  return static_cast<std::uint64_t>(count) * round_up(bytes, page);
}

}  // namespace sherd::offload

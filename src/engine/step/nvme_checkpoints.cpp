#include "engine/step/nvme_checkpoints.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/trace_range.h"

namespace sherd::engine {

using device::Category;
using device::Tier;
using tensor::Tensor;

namespace {

constexpr std::size_t page = 4096;

/// Host memory that the store moves without a copy.
struct HostBuffer {
  HostBuffer(device::Device& device, offload::Store& store, std::size_t bytes)
      : storage(device.allocate(bytes + page, Category::activations, Tier::host)), loan(store.lend(storage)) {
    begin = (page - reinterpret_cast<std::uintptr_t>(storage.data()) % page) % page;
    room = bytes;
  }
  device::Storage storage;
  offload::Loan loan;
  std::size_t begin = 0, room = 0;
};

}  // namespace

/// A value that is kept: on NVMe, and in a buffer while it is written, read, or needed for nothing else.
struct NvmeCheckpoints::Kept {
  Kept(Pool& owner, const Tensor& value) : pool(owner), shape(value.shape()), dtype(value.dtype()) {}
  ~Kept();
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  std::size_t bytes() const { return static_cast<std::size_t>(shape.numel()) * size_of(dtype); }
  Tensor in_buffer() const { return Tensor::view_of(buffer->storage, buffer->begin, shape, dtype); }

  Pool& pool;
  tensor::Shape shape;
  DType dtype;
  std::size_t number = 0;  ///< of all that were kept since none was
  offload::Span span;
  std::unique_ptr<HostBuffer> buffer;  ///< holds the value
  offload::Io io;                      ///< goes first: it uses the buffer
};

class NvmeCheckpoints::Pool {
 public:
  Pool(tensor::Kernels& kernels, offload::Store& store, int buffers)
      : kernels_(kernels), store_(store), most_(static_cast<std::size_t>(std::max(2, buffers))) {}

  std::shared_ptr<Kept> keep(const Tensor& value) {
    if (live_ == 0) begin_round();
    auto kept = std::make_shared<Kept>(*this, value);
    kept->number = kept_.size();
    kept_.push_back(kept.get());
    ++live_;
    kept->span = take_span(kept->bytes());
    kept->buffer = take_buffer(kept->bytes());
    kernels_.copy(value, kept->in_buffer());
    device().synchronize();  // the store is going to read it
    kept->io = store_.write(kept->span, 0, kept->in_buffer().raw(), kept->bytes());
    in_memory_.push_back(kept.get());
    return kept;
  }

  Tensor restore(Kept& kept) {
    const device::TraceRange range("read from NVMe", "activations");
    if (!kept.buffer) read(kept, take_buffer(kept.bytes()));
    kept.io.wait();
    Tensor out = Tensor::empty(device(), kept.shape, kept.dtype, Category::activations);
    kernels_.copy(kept.in_buffer(), out);
    device().synchronize();  // the buffer is going to be reused
    wanted_.push_back(kept.number);
    release_buffer(kept);
    read_ahead();
    return out;
  }

  void forget(Kept& kept) {
    kept.io = {};
    release_buffer(kept);
    if (kept.span.bytes() > 0) spans_.emplace(kept.bytes(), kept.span);
    kept_[kept.number] = nullptr;
    --live_;
  }

 private:
  device::Device& device() const { return kernels_.device(); }

  /// What the last forward and backward wanted, in order, is what this one will want.
  void begin_round() {
    if (wanted_.size() == kept_.size()) order_ = wanted_;
    kept_.clear();
    wanted_.clear();
  }

  offload::Span take_span(std::size_t bytes) {
    if (auto free = spans_.extract(bytes)) return std::move(free.mapped());
    return store_.reserve(cat("activation checkpoint ", made_++), bytes, Category::activations);
  }

  /// A free one; the oldest that has been written; or, where somebody has to read, the one read farthest
  /// ahead.
  std::unique_ptr<HostBuffer> take_buffer(std::size_t bytes) {
    if (free_.empty() && count_ >= most_) release_buffer(*victim());
    if (!free_.empty()) {
      std::unique_ptr<HostBuffer> buffer = std::move(free_.back());
      free_.pop_back();
      if (buffer->room >= bytes) return buffer;
      --count_;
    }
    auto buffer = std::make_unique<HostBuffer>(device(), store_, bytes);
    ++count_;
    return buffer;
  }

  Kept* victim() const {
    const auto written = std::find_if(in_memory_.begin(), in_memory_.end(),
                                      [&](const Kept* kept) { return !is_ahead(*kept); });
    return written == in_memory_.end() ? in_memory_.back() : *written;
  }
  bool is_ahead(const Kept& kept) const {
    return std::find(ahead_.begin(), ahead_.end(), &kept) != ahead_.end();
  }

  void release_buffer(Kept& kept) {
    std::erase(in_memory_, &kept);
    std::erase(ahead_, &kept);
    if (!kept.buffer) return;
    kept.io.wait();
    free_.push_back(std::move(kept.buffer));
  }

  void read(Kept& kept, std::unique_ptr<HostBuffer> buffer) {
    kept.buffer = std::move(buffer);
    in_memory_.push_back(&kept);
    kept.io = store_.read(kept.span, 0, kept.in_buffer().raw(), kept.bytes());
  }

  /// As many as half of the buffers hold; what is still in memory counts.
  void read_ahead() {
    std::size_t ahead = 0;
    for (std::size_t i = wanted_.size(); i < order_.size() && ahead < most_ / 2; ++i, ++ahead) {
      if (order_[i] >= kept_.size() || !kept_[order_[i]]) return;  // this round is another
      Kept& next = *kept_[order_[i]];
      if (is_ahead(next)) continue;
      ahead_.push_back(&next);
      if (!next.buffer) read(next, take_buffer(next.bytes()));
    }
  }

  tensor::Kernels& kernels_;
  offload::Store& store_;
  std::size_t most_, count_ = 0;  ///< buffers
  std::size_t live_ = 0, made_ = 0;
  std::vector<std::unique_ptr<HostBuffer>> free_;
  std::multimap<std::size_t, offload::Span> spans_;  ///< free ones, by size
  std::deque<Kept*> in_memory_, ahead_;              ///< those with a buffer; of them those wanted next
  std::vector<Kept*> kept_;                          ///< of this round, by number; null: gone
  std::vector<std::size_t> wanted_, order_;          ///< numbers, of this round and of the one before
};

NvmeCheckpoints::Kept::~Kept() {
  try {
    pool.forget(*this);
  } catch (const Error&) {
    // It has broken the store, which tells whoever uses it next.
  }
}

NvmeCheckpoints::NvmeCheckpoints(tensor::Kernels& kernels, offload::Store& store, int buffers)
    : pool_(std::make_shared<Pool>(kernels, store, buffers)) {}
NvmeCheckpoints::~NvmeCheckpoints() = default;

autograd::CheckpointKeeper::Restore NvmeCheckpoints::keep(const Tensor& value) {
  return [pool = pool_, kept = pool_->keep(value)] { return pool->restore(*kept); };
}

}  // namespace sherd::engine

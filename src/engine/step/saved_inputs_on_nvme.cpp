#include "engine/step/recompute.h"

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

constexpr std::size_t store_page = 4096;

}  // namespace

/// Host memory that the store moves without a copy.
struct SavedInputsOnNvme::HostBuffer {
  HostBuffer(device::Device& device, offload::Store& store, std::size_t bytes)
      : storage(device.allocate(bytes + store_page, Category::activations, Tier::host)),
        loan(store.lend(storage)) {
    begin = (store_page - reinterpret_cast<std::uintptr_t>(storage.data()) % store_page) % store_page;
    room = bytes;
  }
  device::Storage storage;
  offload::Loan loan;
  std::size_t begin = 0, room = 0;
};

/// A saved value: on NVMe, and in a buffer while it is written, read, or needed for nothing else.
struct SavedInputsOnNvme::Input {
  Input(Pool& owner, const Tensor& value) : pool(owner), shape(value.shape()), dtype(value.dtype()) {}
  ~Input();
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;
  std::size_t bytes() const { return static_cast<std::size_t>(shape.numel()) * size_of(dtype); }
  Tensor in_buffer() const { return Tensor::view_of(buffer->storage, buffer->begin, shape, dtype); }

  Pool& pool;
  tensor::Shape shape;
  DType dtype;
  std::size_t number = 0;  ///< counts all of this round
  offload::Span span;
  std::unique_ptr<HostBuffer> buffer;  ///< holds the value
  offload::Io io;                      ///< goes first: it uses the buffer
};

class SavedInputsOnNvme::Pool {
 public:
  Pool(tensor::Kernels& kernels, offload::Store& store, int buffers)
      : kernels_(kernels), store_(store), most_(static_cast<std::size_t>(std::max(2, buffers))) {}

  std::shared_ptr<Input> save(const Tensor& value) {
    if (live_ == 0) begin_round();
    auto input = std::make_shared<Input>(*this, value);
    input->number = inputs_.size();
    inputs_.push_back(input.get());
    ++live_;
    input->span = take_span(input->bytes());
    input->buffer = take_buffer(input->bytes());
    kernels_.copy(value, input->in_buffer());
    device().synchronize();  // the store is going to read it
    input->io = store_.write(input->span, 0, input->in_buffer().raw(), input->bytes());
    in_memory_.push_back(input.get());
    return input;
  }

  Tensor restore(Input& input) {
    const device::TraceRange range("read from NVMe", "activations");
    if (!input.buffer) read(input, take_buffer(input.bytes()));
    input.io.wait();
    Tensor out = Tensor::empty(device(), input.shape, input.dtype, Category::activations);
    kernels_.copy(input.in_buffer(), out);
    device().synchronize();  // the buffer is going to be reused
    wanted_.push_back(input.number);
    release_buffer(input);
    read_ahead();
    return out;
  }

  void forget(Input& input) {
    input.io = {};
    release_buffer(input);
    if (input.span.bytes() > 0) spans_.emplace(input.bytes(), input.span);
    inputs_[input.number] = nullptr;
    --live_;
  }

 private:
  device::Device& device() const { return kernels_.device(); }

  /// This forward and backward will want what the last one wanted, in its order.
  void begin_round() {
    if (wanted_.size() == inputs_.size()) order_ = wanted_;
    inputs_.clear();
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

  Input* victim() const {
    const auto written = std::find_if(in_memory_.begin(), in_memory_.end(),
                                      [&](const Input* input) { return !is_ahead(*input); });
    return written == in_memory_.end() ? in_memory_.back() : *written;
  }
  bool is_ahead(const Input& input) const {
    return std::find(ahead_.begin(), ahead_.end(), &input) != ahead_.end();
  }

  void release_buffer(Input& input) {
    std::erase(in_memory_, &input);
    std::erase(ahead_, &input);
    if (!input.buffer) return;
    input.io.wait();
    free_.push_back(std::move(input.buffer));
  }

  void read(Input& input, std::unique_ptr<HostBuffer> buffer) {
    input.buffer = std::move(buffer);
    in_memory_.push_back(&input);
    input.io = store_.read(input.span, 0, input.in_buffer().raw(), input.bytes());
  }

  /// As many as half of the buffers hold; what is still in memory counts.
  void read_ahead() {
    std::size_t ahead = 0;
    for (std::size_t i = wanted_.size(); i < order_.size() && ahead < most_ / 2; ++i, ++ahead) {
      if (order_[i] >= inputs_.size() || !inputs_[order_[i]]) return;  // this round is another
      Input& next = *inputs_[order_[i]];
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
  std::deque<Input*> in_memory_, ahead_;  ///< inputs with a buffer; the ones among them that are wanted next
  std::vector<Input*> inputs_;            ///< this round's, by number; null: gone
  std::vector<std::size_t> wanted_, order_;  ///< numbers, of this round and of the one before
};

SavedInputsOnNvme::Input::~Input() {
  try {
    pool.forget(*this);
  } catch (const Error&) {
    // It has broken the store, which tells whoever uses it next.
  }
}

SavedInputsOnNvme::SavedInputsOnNvme(tensor::Kernels& kernels, offload::Store& store, int buffers)
    : pool_(std::make_shared<Pool>(kernels, store, buffers)) {}
SavedInputsOnNvme::~SavedInputsOnNvme() = default;

autograd::SavedInputs::Restore SavedInputsOnNvme::save(const Tensor& value) {
  return [pool = pool_, input = pool_->save(value)] { return pool->restore(*input); };
}

}  // namespace sherd::engine

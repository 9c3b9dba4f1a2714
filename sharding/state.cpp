#include "sharding/state.h"

#include <algorithm>
#include <utility>

namespace sherd::sharding {

using device::Category;
using device::Tier;

namespace {

/// Lists `bytes` of a state's memory as padding on the ledger while the result lives.
std::shared_ptr<void> charge_padding(device::Device& device, Tier tier, Category category,
                                     std::uint64_t bytes) {
  device::Ledger& ledger = device.ledger();
  ledger.reclassify(tier, category, Category::padding, bytes);
  return {nullptr, [&ledger, tier, category, bytes](void*) {
            ledger.reclassify(tier, Category::padding, category, bytes);
          }};
}

}  // namespace

StateBuffer::StateBuffer(device::Device& device, Tensor tensor, std::int64_t begin, Tier tier,
                         Category category, std::uint64_t padding_bytes)
    : device_(&device),
      tier_(tier),
      dtype_(tensor.dtype()),
      begin_(begin),
      numel_(tensor.numel()),
      tensor_(std::move(tensor)),
      padding_(charge_padding(device, tier, category, padding_bytes)) {}

StateBuffer::StateBuffer(device::Device& device, offload::Store& store, std::string name, std::int64_t begin,
                         std::int64_t numel, DType dtype, Category category, std::uint64_t padding_bytes)
    : device_(&device),
      tier_(Tier::nvme),
      dtype_(dtype),
      begin_(begin),
      numel_(numel),
      store_(&store),
      span_(store.reserve(std::move(name), static_cast<std::uint64_t>(numel) * size_of(dtype), category)),
      padding_(charge_padding(device, Tier::nvme, category, padding_bytes)) {}

const Tensor& StateBuffer::tensor() const {
  require(!stored(), "the state '", span_.name(), "' lies on NVMe, not in memory");
  return tensor_;
}

Tensor StateBuffer::range(std::int64_t begin, std::int64_t end) const {
  return tensor().range(begin - begin_, end - begin_);
}

void StateBuffer::check(std::int64_t begin, const Tensor& other) const {
  check(begin, other.numel(), other.dtype());
}

void StateBuffer::check(std::int64_t begin, std::int64_t count, DType dtype) const {
  require(dtype == dtype_ && begin >= begin_ && begin + count <= end(), "elements [", begin, ", ",
          begin + count, ") of ", name_of(dtype), " asked of a state that holds [", begin_, ", ", end(),
          ") of ", name_of(dtype_));
}

void StateBuffer::move(std::byte* to, const std::byte* from, std::size_t bytes) const {
  if (device_->kind() == device::Kind::meta) return;
  device_->copy(to, from, bytes);
  device_->synchronize();
}

offload::Io StateBuffer::read(std::int64_t begin, const Tensor& to) const {
  check(begin, to);
  if (stored())
    return store_->read(span_, static_cast<std::uint64_t>(begin - begin_) * size_of(dtype_), to.raw(),
                        to.bytes());
  move(to.raw(), range(begin, begin + to.numel()).raw(), to.bytes());
  return {};
}

offload::Io StateBuffer::write(std::int64_t begin, const Tensor& from) {
  check(begin, from);
  if (stored())
    return store_->write(span_, static_cast<std::uint64_t>(begin - begin_) * size_of(dtype_), from.raw(),
                         from.bytes());
  move(range(begin, begin + from.numel()).raw(), from.raw(), from.bytes());
  return {};
}

offload::DeferredRead StateBuffer::defer_read(std::int64_t begin, std::int64_t count) const {
  check(begin, count, dtype_);
  require(stored(), "a state in memory is copied, not read later");
  return store_->defer_read(span_, static_cast<std::uint64_t>(begin - begin_) * size_of(dtype_),
                            static_cast<std::size_t>(count) * size_of(dtype_));
}

std::shared_ptr<const Tensor> ExchangePool::take(std::int64_t numel, DType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * size_of(dtype);
  auto& free = shelf_->free;
  const auto it =
      std::find_if(free.begin(), free.end(), [&](const auto& entry) { return entry.first == bytes; });
  device::Storage storage;
  if (it != free.end()) {
    storage = std::move(it->second);
    free.erase(it);
  } else {
    storage = group_.allocate(device_, bytes, Category::communication);
  }
  auto* tensor = new Tensor(Tensor::view_of(std::move(storage), 0, {numel}, dtype));
  return {tensor, [shelf = shelf_, bytes](const Tensor* held) {
            shelf->free.emplace_back(bytes, held->storage());
            delete held;
          }};
}

}  // namespace sherd::sharding

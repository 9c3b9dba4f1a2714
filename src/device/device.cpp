#include "device/device.h"

#include <cstring>
#include <limits>

#include "device/stream.h"

namespace sherd::device {

Storage::Storage(MemoryBlock block, std::function<void(MemoryBlock)> release)
    : state_(std::make_shared<State>(block, std::move(release))) {}

Storage StorageWatch::lock() const {
  Storage storage;
  storage.state_ = state_.lock();
  return storage;
}

void Device::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

void Device::zero(void* data, std::size_t bytes) {
  if (bytes) std::memset(data, 0, bytes);
}

std::shared_ptr<void> Device::pin(void*, std::size_t) {
  return nullptr;
}

Event Device::record() {
  return {};
}

Deadline Device::deadline() const {
  return Deadline::after_seconds(std::numeric_limits<double>::max());
}

}  // namespace sherd::device

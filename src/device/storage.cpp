#include "device/device.h"

namespace sherd::device {

Storage::Storage(Block block, std::function<void(Block)> release)
    : state_(std::make_shared<State>(block, std::move(release))) {}

Storage StorageWatch::lock() const {
  Storage storage;
  storage.state_ = state_.lock();
  return storage;
}

}  // namespace sherd::device

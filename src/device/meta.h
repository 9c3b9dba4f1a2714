#pragma once

#include "device/device.h"

namespace sherd::device {

/// The kind of device whose memory the ledger of `device` tracks: of a meta device the one that it stands
/// for, else its own.
Kind stands_for(const Device& device);

/// make_meta_device() with the ledger of a GPU beside a processor of `threads` threads; it needs no GPU here.
std::shared_ptr<Device> make_meta_gpu(int threads);

}  // namespace sherd::device

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "device/device.h"

namespace sherd::engine {

/// Every rank's list of numbers, however long, in rank order. Collective; counted as scalars. `label` says in
/// errors what for. On a device that only tracks memory all ranks have this one's.
std::vector<std::vector<std::int64_t>> gather_lists(comm::Communicator& ranks, device::Device& device,
                                                    std::vector<std::int64_t> mine, const std::string& label);

}  // namespace sherd::engine

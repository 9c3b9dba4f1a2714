#pragma once

#include <memory>
#include <string>

#include "comm/exchange/backend.h"
#include "comm/messages/port.h"

namespace sherd::comm {

/// Collectives and transfers over messages, for groups that span machines. Non-blocking messages only,
/// polled until the deadline; sums run in rank order here, so results are those of SharedExchange to the bit.
std::unique_ptr<Backend> make_message_exchange(std::shared_ptr<Port> port, std::string name,
                                               const CommOptions& options, std::shared_ptr<Health> parent);

}  // namespace sherd::comm

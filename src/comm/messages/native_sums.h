#pragma once

#include <functional>

#include "comm/exchange/worker.h"
#include "comm/messages/port.h"

namespace sherd::comm {

/// Whether the port's library makes the sums of this call (Reduction::native): the same on all ranks.
bool sums_natively(const Port& port, const Call& call);

/// A reduce-scatter or an all-reduce of which that is true. `wait(request)` returns when the port's request
/// is done, or throws.
void sum_natively(Port& port, Worker& worker, const Call& call, const std::function<void(int request)>& wait);

}  // namespace sherd::comm

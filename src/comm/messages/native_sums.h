#pragma once

#include "comm/exchange/worker.h"
#include "comm/messages/messages.h"

namespace sherd::comm {

/// Whether the port's library makes the sums of this call (Reduction::native): the same on all ranks.
bool sums_natively(const Port& port, const Call& call);

/// A reduce-scatter or an all-reduce of which that is true.
void sum_natively(Messages& messages, Worker& worker, const Call& call);

}  // namespace sherd::comm

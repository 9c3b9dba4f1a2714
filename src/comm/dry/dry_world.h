#pragma once

#include <memory>

#include "comm/collective.h"
#include "comm/communicator.h"

namespace sherd::comm {

/// Rank `rank` of `size`, of whom no other exists: calls are checked and their traffic counted, but nothing
/// moves and all are done at once, so that what peers would have sent keeps the value it had. For steps on a
/// meta device. It has part(), but split() throws, as no other rank says how it splits. `tell`, where given,
/// is told of the calls of its groups, too.
std::unique_ptr<Communicator> make_dry_world(int rank, int size, TellCommWork tell = nullptr);

}  // namespace sherd::comm

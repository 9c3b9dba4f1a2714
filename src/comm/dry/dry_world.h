#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"
#include "comm/exchange/call.h"

namespace sherd::comm {

/// A call of one rank, as far as the rates of links price it.
struct CommWork {
  Collective kind = Collective::none;
  std::uint64_t bytes = 0;  ///< what this rank sends to others
  int ranks = 1;            ///< of the group
  int stride = 1;           ///< how far its first two ranks are apart in the world
  bool async = false;       ///< the caller goes on before it is done

  bool operator==(const CommWork&) const = default;
};

/// Is told of each call with payload or without, in order, from the rank's thread.
using TellCommWork = std::function<void(const CommWork&)>;

/// Rank `rank` of `size`, of whom no other exists: calls are checked and their traffic counted, but nothing
/// moves and all are done at once, so that what peers would have sent keeps the value it had. For steps on a
/// meta device. It has part(), but split() throws, as no other rank says how it splits. `tell`, where given,
/// is told of the calls of its groups, too.
std::unique_ptr<Communicator> make_dry_world(int rank, int size, TellCommWork tell = nullptr);

}  // namespace sherd::comm

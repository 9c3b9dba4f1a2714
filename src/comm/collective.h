#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace sherd::comm {

/// The calls of a communicator. `agree` exchanges a few words inside split() and allocate().
enum class Collective : std::uint8_t {
  none,
  barrier,
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  agree,
  send,
  receive
};
/// "all_gather", "send", …
std::string_view name_of(Collective kind);

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

}  // namespace sherd::comm

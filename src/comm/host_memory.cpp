#include "comm/host_memory.h"

#include <algorithm>

#include "comm/exchange/board.h"
#include "comm/exchange/machine.h"
#include "comm/messages/messages.h"

namespace sherd::comm {

std::uint64_t host_memory(int ranks, int ranks_of_machine) {
  if (ranks <= 1) return 0;
  const int here = std::clamp(ranks_of_machine, 1, std::min(ranks, BoardLayout::max_ranks));
  const int machines = (ranks + here - 1) / here;
  std::uint64_t bytes = BoardLayout::of_processes(here, machines > 1).segment_bytes();
  if (machines == 1) return bytes;
  // Of a chunk: what comes and what goes on, twice as wide as its parts at most; and a few sums that come
  // back.
  bytes += here == 1 ? Machine::unstaged_room : 6 * BoardLayout::spanning_stage;
  return bytes + static_cast<std::uint64_t>(ranks + machines) * Messages::eager_bytes;
}

}  // namespace sherd::comm

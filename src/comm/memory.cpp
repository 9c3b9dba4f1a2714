#include "comm/memory.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <string_view>

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
  // Per chunk there is what comes and what goes on, twice as wide as its parts at most; and a few sums that
  // come back.
  bytes += here == 1 ? MachineTransport::unstaged_room : 6 * BoardLayout::spanning_stage;
  return bytes + static_cast<std::uint64_t>(ranks + machines) * Messages::eager_bytes;
}

std::uint64_t nccl_memory(int ranks, int ranks_of_machine, int channels) {
  constexpr std::uint64_t mib = std::uint64_t{1} << 20;
  if (ranks <= 1) return 0;
  const auto width = static_cast<std::uint64_t>(channels);
  std::uint64_t bytes = 64 * mib;
  if (ranks_of_machine > 1) bytes += static_cast<std::uint64_t>(ranks_of_machine) * width * 12 * mib;
  if (ranks > ranks_of_machine) bytes += 2 * width * 10 * mib + 128 * mib;
  return bytes;
}

std::uint64_t nccl_pairs_memory(int sends, int receives, bool one_machine, int channels) {
  constexpr std::uint64_t mib = std::uint64_t{1} << 20;
  const auto out = static_cast<std::uint64_t>(sends), in = static_cast<std::uint64_t>(receives);
  if (!one_machine) return (out + in) * 128 * mib;
  return (out * 2 + in * 10) * static_cast<std::uint64_t>(channels) * mib;
}

int nccl_channels() {
  constexpr int most = 32;
  int out = most;
  for (const char* name : {"NCCL_MAX_P2P_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"}) {
    const char* text = std::getenv(name);
    int value = 0;
    if (!text) continue;
    const std::string_view all = text;
    if (std::from_chars(all.data(), all.data() + all.size(), value).ec == std::errc() && value > 0)
      out = std::min(out, value);
  }
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(out)));  // NCCL rounds up too
}

}  // namespace sherd::comm

#include "comm/exchange/collective_backend.h"

#include <algorithm>

namespace sherd::comm {

void CollectiveBackend::dispatch(Call& call) {
  switch (call.kind) {
    case Collective::barrier:
      return barrier(call);
    case Collective::all_gather:
      return all_gather(call);
    case Collective::reduce_scatter:
      return reduce_scatter(call);
    case Collective::all_reduce:
      return all_reduce(call);
    case Collective::broadcast:
      return broadcast(call);
    case Collective::all_to_all:
      return all_to_all(call);
    case Collective::agree:
      return agree(call);
    default:
      sherd::fail(ErrorKind::usage, name_of(call.kind), " is not a collective");
  }
}

SplitPlan plan_split(const std::vector<std::int64_t>& words, int rank) {
  SplitPlan plan;
  const auto color = [&](int r) { return words[static_cast<std::size_t>(2 * r)]; };
  const auto key = [&](int r) { return words[static_cast<std::size_t>(2 * r + 1)]; };
  if (color(rank) < 0) return plan;
  for (int r = 0; r < static_cast<int>(words.size() / 2); ++r)
    if (color(r) == color(rank)) plan.members.push_back(r);
  std::stable_sort(plan.members.begin(), plan.members.end(), [&](int a, int b) { return key(a) < key(b); });
  plan.rank =
      static_cast<int>(std::find(plan.members.begin(), plan.members.end(), rank) - plan.members.begin());
  return plan;
}

std::string group_name(const std::string& backend, const std::vector<int>& world_ranks, int world_size) {
  const int size = static_cast<int>(world_ranks.size());
  if (size == world_size) return cat(backend, "(", size, ")");
  return cat(backend, "(", size, " of ", world_size, ": ", list_ranks(world_ranks), ")");
}

}  // namespace sherd::comm

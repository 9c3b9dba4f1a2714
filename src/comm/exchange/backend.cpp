#include "comm/exchange/backend.h"

#include <algorithm>

#include "base/text/excerpt.h"

namespace sherd::comm {

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

GroupPart find_part(const std::vector<std::vector<int>>& parts, int rank, int size) {
  GroupPart found;
  found.alone = std::all_of(parts.begin(), parts.end(), [](const auto& each) { return each.size() == 1; });
  std::vector<bool> taken(static_cast<std::size_t>(size));
  for (std::size_t k = 0; k < parts.size(); ++k) {
    require(!parts[k].empty(), "part ", k, " of a group of ", size, " has no ranks");
    for (std::size_t i = 0; i < parts[k].size(); ++i) {
      const int member = parts[k][i];
      require(0 <= member && member < size, "part ", k, " holds rank ", member, ", which is not one of ",
              size);
      require(!taken[static_cast<std::size_t>(member)], "rank ", member, " is in two places of the parts");
      taken[static_cast<std::size_t>(member)] = true;
      if (member != rank) continue;
      found.color = static_cast<int>(k), found.members = parts[k], found.rank = static_cast<int>(i);
    }
  }
  return found;
}

void Backend::throw_if_failed() const {
  if (const std::string text = failure(); !text.empty()) throw Error(ErrorKind::comm, text);
}

void Backend::fail_and_throw(const std::string& reason) {
  fail(reason);
  throw Error(ErrorKind::comm, failure());
}

std::unique_ptr<Backend> Backend::part(const GroupPart& part) {
  if (!part.alone) return split(part.color, part.key());
  return part.color < 0
             ? nullptr
             : make_alone({.timeout_seconds = timeout_seconds(), .threads = threads()}, world_rank(rank()));
}

std::string group_name(const std::string& backend, const std::vector<int>& world_ranks, int world_size) {
  const int size = static_cast<int>(world_ranks.size());
  if (size == world_size) return cat(backend, "(", size, ")");
  return cat(backend, "(", size, " of ", world_size, ": ranks ", joined_text(world_ranks), ")");
}

}  // namespace sherd::comm

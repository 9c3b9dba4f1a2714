#include "sharding/schedule/schedules.h"

#include <algorithm>
#include <limits>
#include <map>

namespace sherd::sharding {
namespace {

using Op = Instruction::Op;

/// By micro-batch, where the list is through with it.
std::map<std::int64_t, std::size_t> ends_of(const std::vector<Instruction>& list) {
  std::map<std::int64_t, std::size_t> ends;
  for (std::size_t i = 0; i < list.size(); ++i)
    if (list[i].op == Op::backward || list[i].op == Op::weight_gradients) ends[list[i].micro_batch] = i;
  return ends;
}

}  // namespace

std::int64_t most_in_flight(std::vector<Instruction> list) {
  return keep_activations(list, std::numeric_limits<std::int64_t>::max());
}

std::int64_t keep_activations(std::vector<Instruction>& list, std::int64_t most) {
  const std::map<std::int64_t, std::size_t> ends = ends_of(list);
  std::map<std::int64_t, bool> keeps;  // of micro-batches that have begun
  std::int64_t now = 0, largest = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::int64_t micro_batch = list[i].micro_batch;
    if (list[i].op == Op::forward) {
      const auto [mine, begins] = keeps.emplace(micro_batch, now < most);
      if (begins && mine->second) largest = std::max(largest, ++now);
      list[i].keeps_activations = mine->second;
    }
    const auto end = ends.find(micro_batch);
    if (end != ends.end() && end->second == i && keeps.at(micro_batch)) --now;
  }
  return largest;
}

}  // namespace sherd::sharding

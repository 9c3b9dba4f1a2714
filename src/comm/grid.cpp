#include "comm/grid.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <string>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::comm {
namespace {

/// A size that must be a multiple of another key's: which, how large, and why.
struct GridUnit {
  const char* key = "";
  int size = 1;
  const char* why = "";
};

/// Cuts `whole` into parts of `size`, a multiple of `units` as `whole` is, and returns how many there are.
int cut(const char* key, int size, int whole, const std::string& what,
        std::initializer_list<GridUnit> units = {}) {
  int step = 1;
  for (const GridUnit& unit : units) step = std::lcm(step, unit.size);
  if (size >= 1 && whole % size == 0 && size % step == 0) return whole / size;
  std::string would_do;
  for (int divisor = step; divisor <= whole; divisor += step)
    if (whole % divisor == 0) would_do += cat(would_do.empty() ? "" : ", ", divisor);
  for (const GridUnit& unit : units)
    if (size >= 1 && whole % size == 0 && size % unit.size != 0)
      fail(ErrorKind::config, key, " ", size, " is no multiple of ", unit.key, " ", unit.size,
           ", whose ranks ", unit.why, "; sizes that do: ", would_do);
  fail(ErrorKind::config, key, " ", size, " does not divide ", what, "; sizes that do: ", would_do,
       size > whole ? "; or start more ranks" : "");
}

}  // namespace

std::string_view name_of(Axis axis) {
  constexpr std::string_view names[axis_count] = {"tensor",       "context",      "shard",          "replica",
                                                  "tensor_shard", "pipeline",     "data",           "expert",
                                                  "expert_data",  "expert_shard", "expert_replica", "world"};
  return names[static_cast<std::size_t>(axis)];
}

Grid::Grid(int ranks, const GridSizes& sizes) {
  require(ranks >= 1, "a grid needs at least 1 rank, not ", ranks);
  const auto left = [](int whole, const char* of) { return cat("the ", counted(whole, "rank"), of); };
  const int stage = cut("parallel.pipeline", sizes.pipeline, ranks, left(ranks, ""));
  const int sequence = cut("parallel.tensor", sizes.tensor, stage,
                           left(stage, sizes.pipeline == 1 ? "" : " of a pipeline stage"));
  const int data =
      cut("parallel.context", sizes.context, sequence,
          left(sequence, sizes.tensor * sizes.pipeline == 1 ? "" : " that tensor and pipeline leave"));
  const int shard = sizes.shard == 0 ? sequence : sizes.shard;
  const int copies = cut("parallel.expert", sizes.expert, sequence, left(sequence, " of context × data"));
  const int replica =
      cut("parallel.shard_size", shard, sequence,
          sizes.context == 1 ? counted(data, "data-parallel rank") : left(sequence, " of context × data"),
          {{"parallel.context", sizes.context, "share states"},
           {"parallel.expert", sizes.expert, "have one replica's experts together"}});

  const auto set = [&](Axis axis, int stride, int size) {
    lines_[static_cast<std::size_t>(axis)] = {stride, size};
  };
  const int data_stride = sizes.tensor * sizes.context, tensor_expert = sizes.tensor * sizes.expert;
  set(Axis::tensor, 1, sizes.tensor);
  set(Axis::context, sizes.tensor, sizes.context);
  set(Axis::data, data_stride, data);
  set(Axis::shard, sizes.tensor, shard);
  set(Axis::replica, sizes.tensor * shard, replica);
  set(Axis::tensor_shard, 1, sizes.tensor * shard);
  set(Axis::pipeline, stage, sizes.pipeline);
  set(Axis::expert, sizes.tensor, sizes.expert);
  set(Axis::expert_data, tensor_expert, copies);
  set(Axis::expert_shard, tensor_expert, shard / sizes.expert);
  set(Axis::expert_replica, sizes.tensor * shard, replica);
  set(Axis::world, 1, ranks);
}

int Grid::size(Axis axis) const {
  return line(axis).size;
}

int Grid::coordinate(Axis axis, int rank) const {
  require(0 <= rank && rank < ranks(), "rank ", rank, " is not one of ", ranks());
  return rank / line(axis).stride % line(axis).size;
}

std::vector<int> Grid::members(Axis axis, int rank) const {
  const auto& [stride, size] = line(axis);
  const int first = rank - coordinate(axis, rank) * stride;
  std::vector<int> out(static_cast<std::size_t>(size));
  for (int k = 0; k < size; ++k) out[static_cast<std::size_t>(k)] = first + k * stride;
  return out;
}

std::vector<int> Grid::replicas_on(const std::vector<int>& stages, int rank) const {
  std::vector<int> out;
  for (const int stage : stages) {
    require(0 <= stage && stage < size(Axis::pipeline), "stage ", stage, " is not one of ",
            size(Axis::pipeline));
    const int there = rank + (stage - coordinate(Axis::pipeline, rank)) * line(Axis::pipeline).stride;
    for (const int member : members(Axis::replica, there)) out.push_back(member);
  }
  return out;
}

std::vector<std::vector<int>> Grid::partition_on(const std::vector<int>& stages) const {
  std::vector<std::vector<int>> out;
  for (int rank = 0; rank < ranks(); ++rank)
    if (coordinate(Axis::pipeline, rank) == stages.front() && coordinate(Axis::replica, rank) == 0)
      out.push_back(replicas_on(stages, rank));
  return out;
}

int Grid::size_on_machine(Axis axis, int rank, int ranks_of_machine) const {
  const auto& [stride, size] = line(axis);
  const int first = rank - coordinate(axis, rank) * stride;
  const std::int64_t begin = std::int64_t{rank} / ranks_of_machine * ranks_of_machine,
                     end = begin + ranks_of_machine;
  const auto below = [&](std::int64_t limit) {  // members before that rank
    return std::clamp<std::int64_t>((limit - first + stride - 1) / stride, 0, size);
  };
  return static_cast<int>(below(end) - below(begin));
}

bool Grid::same_groups(Axis a, Axis b) const {
  return size(a) == size(b) && (size(a) == 1 || line(a).stride == line(b).stride);
}

std::vector<std::vector<int>> Grid::partition(Axis axis) const {
  std::vector<std::vector<int>> out;
  for (int rank = 0; rank < ranks(); ++rank)
    if (coordinate(axis, rank) == 0) out.push_back(members(axis, rank));
  return out;
}

}  // namespace sherd::comm

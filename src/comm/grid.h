#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace sherd::comm {

/// The ways in which ranks form groups. The ranks of an axis's group differ in that axis alone (or, where it
/// is made of other axes, in these).
enum class Axis : std::uint8_t {
  tensor,          ///< ranks that hold slices of the same layers
  context,         ///< ranks that hold pieces of the same sequences
  shard,           ///< ranks that share states: context × a part of data
  replica,         ///< ranks that hold the same states, one of each shard group
  tensor_shard,    ///< tensor × shard: of parameters whose gradients are sums over tensor ranks too
  pipeline,        ///< ranks that hold the stages of one model
  data,            ///< ranks that see different data
  expert,          ///< ranks that hold different experts of the same layers
  expert_data,     ///< ranks that hold the same experts
  expert_shard,    ///< ranks among them that share the experts' states
  expert_replica,  ///< ranks among them that hold the same states of experts, one of each shard group
  world            ///< all
};
inline constexpr int axis_count = 12;
/// "tensor", "expert_data", ...
std::string_view name_of(Axis axis);

/// The sizes that a grid is asked for. The rest of the world is the data-parallel size.
struct GridSizes {
  int tensor = 1, context = 1, pipeline = 1;
  int expert = 1;  ///< divides context × data
  int shard = 0;   ///< a multiple of context, and of expert, that divides context × data; 0: all of it
};

/// The ranks of a world as a grid: pure arithmetic, the same on every rank.
///
/// There are two views of the same ranks, in Megatron-LM's order tp-cp-ep-dp-pp with the left fastest: the
/// dense one of tensor × context × data × pipeline, and that of experts, tensor × expert × expert_data ×
/// pipeline (experts are cut as dense layers are). Context × data is cut further into shard × replica, shard
/// fastest, so that ranks that share states are neighbours; each shard group holds whole context groups.
/// So are ranks with the same experts, as each shard group holds whole expert groups.
class Grid {
 public:
  /// Throws Error{config} for a size that the ranks cannot hold, with those that would do; Error{usage} for a
  /// world of no ranks.
  explicit Grid(int ranks, const GridSizes& sizes = {});

  int ranks() const { return size(Axis::world); }
  /// Ranks of each of the axis's groups.
  int size(Axis axis) const;
  /// The ranks of a group lie so many ranks apart.
  int stride(Axis axis) const { return line(axis).stride; }
  /// The rank's place in its group of the axis.
  int coordinate(Axis axis, int rank) const;
  /// The ranks of its group, in the order of their coordinates.
  std::vector<int> members(Axis axis, int rank) const;
  /// The rank's replicas (Axis::replica), itself among them, on each of the pipeline stages `stages`, one
  /// stage after the other: they hold its shard of parameters that these stages all have.
  std::vector<int> replicas_on(const std::vector<int>& stages, int rank) const;
  /// All such groups.
  std::vector<std::vector<int>> partition_on(const std::vector<int>& stages) const;
  /// How many of its group's ranks share its machine, where each machine holds so many ranks in their order.
  int size_on_machine(Axis axis, int rank, int ranks_of_machine) const;
  /// Whether the two axes have the same groups.
  bool same_groups(Axis a, Axis b) const;
  /// All groups of the axis, in the order of their first ranks: every rank is in one.
  std::vector<std::vector<int>> partition(Axis axis) const;

 private:
  /// Ranks that differ by multiples of `stride` below stride × size.
  struct Line {
    int stride = 1, size = 1;
  };
  const Line& line(Axis axis) const { return lines_[static_cast<std::size_t>(axis)]; }

  std::array<Line, axis_count> lines_;
};

}  // namespace sherd::comm

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "device/device.h"
#include "engine/checkpoint/checkpoint.h"
#include "nn/weight_source.h"
#include "sharding/sharded_model.h"
#include "tensor/formats/stored_format.h"
#include "tensor/slice.h"

namespace sherd::engine {

/// One state of a segment that a checkpoint holds: flat elements [begin, end), and how to read and set them
/// in memory of the processor.
struct SavedState {
  std::string kind;  ///< "fp32", "frozen", "exp_avg", …; of what each replica has, without its number
  DType dtype;       ///< in files; uint8: bytes of blocks of `format`
  std::int64_t begin, end;
  /// Reads what files hold, from a place on that in_file() gave.
  std::function<void(std::int64_t, const tensor::Tensor&)> read;
  /// Sets elements from a flat element on; of blocks, values in fp32, of whole ones but at a parameter's end.
  std::function<void(std::int64_t, const tensor::Tensor&)> write;
  StoredFormat format = StoredFormat::compute;
  /// Sets blocks, the first of which begins with a flat element. Null where there are none.
  std::function<void(std::int64_t, const tensor::Tensor&)> write_blocks{};
  /// Makes what `read` gives now of `count` elements from a place on, to be read later. Null where training
  /// does not change it.
  std::function<sharding::Frozen(std::int64_t, std::int64_t, sharding::FrozenMemory&)> freeze{};
  optim::OverReplicas over_replicas = optim::OverReplicas::same;
  int replica = 0, replicas = 1;  ///< which of how many this rank belongs to
  /// Which of them this rank writes, so that the ranks together write every element once, of what each
  /// replica has once for each.
  tensor::Range written{0, 0};

  /// How many numbers of `dtype` these elements, from the first of a block on, are in files.
  std::int64_t in_file(std::int64_t elements) const {
    return in_blocks() ? tensor::stored_bytes(format, elements) : elements;
  }
  /// The type that `write` takes.
  DType value_dtype() const { return in_blocks() ? DType::f32 : dtype; }
  bool in_blocks() const { return format != StoredFormat::compute; }
};

/// The name in files of a kind of state of which replica number `replica` has values of its own.
std::string kind_of_replica(const std::string& kind, std::int64_t replica);

/// Which states of a model are meant.
enum class Kinds : std::uint8_t {
  weights,  ///< fp32 or frozen
  all       ///< the optimizer's too
};

/// The weights first, then what the segment's update rule keeps beside them, by name.
std::vector<SavedState> saved_states(sharding::Segment& segment, Kinds kinds);

/// A rank's work on its states: it writes its share of each, and reads all that it holds.
enum class PieceUse : std::uint8_t { written, read };

/// Calls visit(state, parameter, piece) for the rank's part of the states of `kinds`.
template <class Visit>
void for_each_piece(const sharding::ShardedModel& model, Kinds kinds, PieceUse extent, const Visit& visit) {
  for (const auto& unit : model.units())
    for (const auto& segment : unit->segments())
      for (const SavedState& state : saved_states(*segment, kinds)) {
        const tensor::Range range =
            extent == PieceUse::written ? state.written : tensor::Range{state.begin, state.end};
        for (const sharding::Piece& piece : segment->layout().pieces(range.begin, range.end))
          visit(state, *segment->layout().parameters()[piece.slot], piece);
      }
}

/// Elements that pass through memory at once: few enough that it hardly notices.
inline constexpr std::int64_t most_at_once = std::int64_t{1} << 20;

/// Calls visit(done, elements) over `count` elements, in memory of the processor, most_at_once at a time.
void in_chunks(device::Device& device, DType dtype, std::int64_t count,
               const std::function<void(std::int64_t, const tensor::Tensor&)>& visit);

// ---- reading a rank's states ----
/// The files that read_states() will read. Throws Error{data} unless the checkpoint has all that it needs.
std::set<std::string> require_states(const CheckpointReader& reader, const sharding::ShardedModel& model,
                                     Kinds kinds);

/// Reads this rank's states of `kinds`; the compute parameters follow from the weights. Calls no collective.
void read_states(const CheckpointReader& reader, const sharding::ShardedModel& model, Kinds kinds,
                 device::Device& device);

/// Reads this rank's weights, trained and frozen ones, from `source`. Calls no collective.
void read_weights(nn::WeightSource& source, const sharding::ShardedModel& model, device::Device& device);

/// Makes the parameters that modules see of the states that all ranks have read. Collective.
void publish_all(sharding::ShardedModel& model);

}  // namespace sherd::engine

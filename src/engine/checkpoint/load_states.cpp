#include "engine/checkpoint/load_states.h"

#include "engine/checkpoint/same_model.h"

namespace sherd::engine {

using sharding::Piece;
using tensor::Tensor;

void require_states(const CheckpointReader& reader, const sharding::ShardedModel& model, Kinds kinds) {
  for_each_piece(model, kinds, Extent::read,
                 [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
                   reader.require_state(state.kind, parameter.name, parameter.logical_slice(),
                                        piece.parameter_begin, piece.parameter_begin + piece.count,
                                        state.dtype);
                 });
}

void read_states(const CheckpointReader& reader, const sharding::ShardedModel& model, Kinds kinds,
                 device::Device& device) {
  for_each_piece(
      model, kinds, Extent::read,
      [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
        const tensor::Slice slice = parameter.logical_slice();
        in_chunks(device, state.dtype, piece.count, [&](std::int64_t done, const Tensor& elements) {
          reader.read(state.kind, parameter.name, slice, piece.parameter_begin + done, elements);
          state.write(piece.flat_begin + done, elements);
        });
      });
}

void publish_all(sharding::ShardedModel& model) {
  for (const auto& unit : model.units())
    for (const auto& segment : unit->segments()) model.publish(*segment);
  model.end_step();
}

void load_weights(const CheckpointReader& reader, sharding::ShardedModel& model, tensor::Kernels& kernels) {
  require_same_model(reader, model.model(), nullptr);
  read_states(reader, model, Kinds::weights, kernels.device());
  publish_all(model);
}

}  // namespace sherd::engine

#include "engine/checkpoint/load_states.h"

#include <algorithm>

#include "engine/checkpoint/same_model.h"
#include "engine/checkpoint/weights.h"
#include "engine/step/step_states.h"

namespace sherd::engine {

using sharding::Piece;
using tensor::Tensor;

namespace {

/// The tensors of a checkpoint whose mean a state takes: the one of its kind; of what each replica has, that
/// of this one, or, where there were other replicas, all of theirs. None where the checkpoint's run had no
/// replicas: then it is zero.
std::vector<std::string> sources_of(const CheckpointReader& reader, const SavedState& state,
                                    const std::string& parameter) {
  if (state.over_replicas == optim::OverReplicas::same) return {state.kind};
  if (state.over_replicas == optim::OverReplicas::spread)
    return reader.holds(state.kind, parameter) ? std::vector{state.kind} : std::vector<std::string>();
  std::vector<std::string> out;
  for (std::int64_t replica = 0;; ++replica) {
    std::string kind = kind_of_replica(state.kind, replica);
    if (!reader.holds(kind, parameter)) break;
    out.push_back(std::move(kind));
  }
  if (std::ssize(out) == state.replicas) return {out[static_cast<std::size_t>(state.replica)]};
  return out;
}

/// `elements` of the state from local element `begin` on: the mean of `sources`.
void read_mean(const CheckpointReader& reader, const std::vector<std::string>& sources,
               const std::string& parameter, const tensor::Slice& slice, std::int64_t begin,
               const Tensor& elements, const Tensor& more) {
  if (sources.size() == 1) return reader.read(sources.front(), parameter, slice, begin, elements);
  float* mean = elements.data<float>();
  const float* one = more.data<float>();
  std::fill_n(mean, elements.numel(), 0.0f);
  for (const std::string& kind : sources) {
    reader.read(kind, parameter, slice, begin, more);
    for (std::int64_t i = 0; i < elements.numel(); ++i) mean[i] += one[i];
  }
  for (std::int64_t i = 0; !sources.empty() && i < elements.numel(); ++i)
    mean[i] /= static_cast<float>(sources.size());
}

}  // namespace

void require_states(const CheckpointReader& reader, const sharding::ShardedModel& model, Kinds kinds) {
  for_each_piece(model, kinds, Extent::read,
                 [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
                   for (const std::string& kind : sources_of(reader, state, parameter.name))
                     reader.require_state(kind, parameter.name, parameter.logical_slice(),
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
        const std::vector<std::string> sources = sources_of(reader, state, parameter.name);
        in_chunks(device, state.value_dtype(), piece.count, [&](std::int64_t done, const Tensor& elements) {
          const Tensor more = sources.size() > 1
                                  ? Tensor::empty(device, {elements.numel()}, state.dtype,
                                                  device::Category::workspace, device.processor_tier())
                                  : Tensor();
          read_mean(reader, sources, parameter.name, slice, piece.parameter_begin + done, elements, more);
          state.write(piece.flat_begin + done, elements);
        });
      });
}

void read_weights(nn::WeightSource& source, const sharding::ShardedModel& model, device::Device& device) {
  for_each_piece(model, Kinds::weights, Extent::read,
                 [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
                   if (!source.has(parameter.name)) return;
                   const tensor::Slice slice = parameter.logical_slice();
                   in_chunks(device, state.value_dtype(), piece.count,
                             [&](std::int64_t done, const Tensor& elements) {
                               source.read(parameter.name, slice, piece.parameter_begin + done, elements);
                               state.write(piece.flat_begin + done, elements);
                             });
                 });
}

void publish_all(sharding::ShardedModel& model) {
  for (const auto& unit : model.units())
    for (const auto& segment : unit->segments()) model.publish(*segment);
  model.end_step();
}

void load_weights(nn::WeightSource& source, sharding::ShardedModel& model, tensor::Kernels& kernels) {
  source.check(model.model().parameters());
  require_step_states(model.model(), source.step_states());
  read_weights(source, model, kernels.device());
  restore_step_states(model.model(), source.step_states());
  publish_all(model);
}

}  // namespace sherd::engine

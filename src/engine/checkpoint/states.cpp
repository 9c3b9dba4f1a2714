#include "engine/checkpoint/states.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/checkpoint/same_run.h"
#include "engine/checkpoint/weights.h"
#include "engine/step/step_states.h"
#include "optim/split_master.h"
#include "tensor/formats/pruned.h"

namespace sherd::engine {

using sharding::Piece;
using sharding::Segment;
using tensor::Tensor;

namespace {

/// The part of [begin, end) that one of `holders` writes, of those that hold it: whole blocks.
tensor::Range share_of(std::int64_t begin, std::int64_t end, std::int64_t holder, std::int64_t holders,
                       std::int64_t block) {
  const std::int64_t blocks = (std::max<std::int64_t>(0, end - begin) + block - 1) / block;
  const auto until = [&](std::int64_t parts) {
    return std::min(begin + blocks * parts / holders * block, std::max(begin, end));
  };
  return {until(holder), until(holder + 1)};
}

/// The part of a rank's own shard that is to be written here.
tensor::Range written_range(const Segment& segment, optim::OverReplicas over_replicas) {
  const sharding::RankGroups& groups = segment.groups();
  const std::int64_t begin = segment.own_begin(), end = segment.own_end(),
                     block =
                         segment.key().in_blocks() ? segment.layout().block() : sharding::layout_alignment;
  if (over_replicas == optim::OverReplicas::same)
    return share_of(begin, end, groups.holder(), groups.holders(), block);
  const int copy = groups.copies ? groups.copies->rank() : 0,
            copies = groups.copies ? groups.copies->size() : 1;
  if (over_replicas == optim::OverReplicas::own) return share_of(begin, end, copy, copies, block);
  const Segment::Range served = segment.served();
  return share_of(std::max(begin, served.begin), std::min(end, served.end), copy, copies, block);
}

SavedState frozen_state(Segment& segment) {
  sharding::StateBuffer& buffer = segment.parameters();
  const bool own = segment.parameters_sharded(), blocks = segment.key().in_blocks();
  SavedState out{"frozen",
                 buffer.dtype(),
                 own ? segment.own_begin() : 0,
                 own ? segment.own_end() : segment.layout().padded(),
                 [&buffer](std::int64_t at, const Tensor& to) { buffer.read(at, to).wait(); },
                 [&segment, &buffer, blocks](std::int64_t at, const Tensor& from) {
                   blocks ? segment.write_values(at, from) : buffer.write(at, from).wait();
                 },
                 segment.key().format};
  if (blocks)
    out.write_blocks = [&segment](std::int64_t at, const Tensor& from) { segment.write_blocks(at, from); };
  return out;
}

std::vector<SavedState> states_of(Segment& segment, Kinds kinds) {
  if (!segment.key().trainable) return {frozen_state(segment)};
  std::vector<SavedState> out{
      {"fp32", DType::f32, segment.update_begin(), segment.update_end(),
       [&segment](std::int64_t at, const Tensor& to) { segment.read_masters(at, to); },
       [&segment](std::int64_t at, const Tensor& from) { segment.write_values(at, from); }}};
  out.back().freeze = [&segment](std::int64_t at, std::int64_t count, sharding::FrozenMemory& memory) {
    return segment.freeze_masters(at, count, memory);
  };
  for (std::size_t i = 0; kinds == Kinds::all && i < segment.states().size(); ++i) {
    const optim::State& kept = segment.states()[i];
    const sharding::StateBuffer& buffer = segment.moments()[i];
    out.push_back({kept.name, kept.code == optim::Code::none ? buffer.dtype() : DType::f32, buffer.begin(),
                   buffer.end(),
                   [&segment, i](std::int64_t at, const Tensor& to) { segment.read_state(i, at, to); },
                   [&segment, i](std::int64_t at, const Tensor& from) { segment.write_state(i, at, from); }});
    out.back().freeze = [&segment, i](std::int64_t at, std::int64_t count, sharding::FrozenMemory& memory) {
      return segment.freeze_state(i, at, count, memory);
    };
    out.back().over_replicas = kept.over_replicas;
  }
  return out;
}

}  // namespace

std::vector<SavedState> saved_states(Segment& segment, Kinds kinds) {
  std::vector<SavedState> out = states_of(segment, kinds);
  for (SavedState& state : out) {
    state.written = written_range(segment, state.over_replicas);
    state.replica = segment.groups().replica_index(), state.replicas = segment.groups().replicas();
  }
  return out;
}

std::string kind_of_replica(const std::string& kind, std::int64_t replica) {
  return cat(kind, "_", replica);
}

void in_chunks(device::Device& device, DType dtype, std::int64_t count,
               const std::function<void(std::int64_t, const Tensor&)>& visit) {
  const Tensor chunk = Tensor::on_host(device, {std::min(most_at_once, count)}, dtype);
  for (std::int64_t done = 0; done < count; done += most_at_once)
    visit(done, chunk.range(0, std::min(most_at_once, count - done)));
}

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

std::set<std::string> require_states(const CheckpointReader& reader, const sharding::ShardedModel& model,
                                     Kinds kinds) {
  std::set<std::string> out;
  for_each_piece(model, kinds, PieceUse::read,
                 [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
                   for (const std::string& kind : sources_of(reader, state, parameter.name))
                     out.merge(reader.require_state(
                         kind, parameter.name, parameter.logical_slice(), piece.parameter_begin,
                         piece.parameter_begin + piece.count, state.dtype, state.format));
                 });
  return out;
}

void read_states(const CheckpointReader& reader, const sharding::ShardedModel& model, Kinds kinds,
                 device::Device& device) {
  bool warned = false;
  for_each_piece(
      model, kinds, PieceUse::read,
      [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
        const tensor::Slice slice = parameter.logical_slice();
        const std::vector<std::string> sources = sources_of(reader, state, parameter.name);
        in_chunks(device, state.value_dtype(), piece.count, [&](std::int64_t done, const Tensor& elements) {
          if (state.in_blocks()) {
            const Tensor blocks = Tensor::on_host(device, {state.in_file(elements.numel())}, state.dtype);
            if (reader.read_blocks(state.kind, parameter.name, slice, piece.parameter_begin + done,
                                   elements.numel(), blocks))
              return state.write_blocks(piece.flat_begin + done, blocks);
            if (!std::exchange(warned, true))
              log_warning(
                  "these ranks cut blocks of '", parameter.name, "' in ", tensor::name_of(state.format),
                  " otherwise than those that saved them: such weights are quantised anew, and may move "
                  "by a step of their codes");
          }
          const Tensor more =
              sources.size() > 1 ? Tensor::on_host(device, {elements.numel()}, state.dtype) : Tensor();
          read_mean(reader, sources, parameter.name, slice, piece.parameter_begin + done, elements, more);
          state.write(piece.flat_begin + done, elements);
        });
      });
}

namespace {

/// Reads weights of which two in four are to be pruned, as what they are in fp32 says, whatever type they
/// get. A part of a parameter that is read at once begins and ends between fours.
void read_pruned(nn::WeightSource& source, const std::string& name, const tensor::Slice& slice,
                 std::int64_t begin, const Tensor& to, device::Device& device) {
  const bool wide = to.dtype() == DType::f32;
  const Tensor values = wide ? to : Tensor::on_host(device, {to.numel()}, DType::f32);
  source.read(name, slice, begin, values);
  const auto count = static_cast<std::size_t>(values.numel());
  tensor::prune_two_of_four({values.data<float>(), count});
  if (wide) return;
  optim::round_masters(values.data<float>(), to.raw(), to.dtype(), to.numel(), device.arena());
  tensor::keep_unpruned({values.data<float>(), count}, {reinterpret_cast<std::uint16_t*>(to.raw()), count});
}

}  // namespace

void read_weights(nn::WeightSource& source, const sharding::ShardedModel& model, device::Device& device) {
  for_each_piece(model, Kinds::weights, PieceUse::read,
                 [&](const SavedState& state, const autograd::Parameter& parameter, const Piece& piece) {
                   if (!source.has(parameter.name)) return;
                   const tensor::Slice slice = parameter.logical_slice();
                   in_chunks(device, state.value_dtype(), piece.count,
                             [&](std::int64_t done, const Tensor& elements) {
                               const std::int64_t begin = piece.parameter_begin + done;
                               if (parameter.pruned)
                                 read_pruned(source, parameter.name, slice, begin, elements, device);
                               else
                                 source.read(parameter.name, slice, begin, elements);
                               state.write(piece.flat_begin + done, elements);
                             });
                 });
}

void publish_all(sharding::ShardedModel& model) {
  for (const auto& unit : model.units())
    for (const auto& segment : unit->segments()) model.publish(*segment);
  model.end_step();
  model.values_changed();
}

void load_weights(nn::WeightSource& source, sharding::ShardedModel& model, tensor::Kernels& kernels) {
  source.check(model.model().parameters());
  require_step_states(model.model(), source.step_states());
  read_weights(source, model, kernels.device());
  restore_step_states(model.model(), source.step_states());
  publish_all(model);
}

}  // namespace sherd::engine

#include "engine/step/chunk_runner.h"

#include <chrono>
#include <utility>

#include "sharding/sharded_model.h"

namespace sherd::engine {

using autograd::Tape;
using autograd::Var;
using autograd::WeightGradients;
using sharding::Chunk;
using sharding::Instruction;
using tensor::Tensor;

ChunkRunner::ChunkRunner(nn::Model& model, sharding::ShardedModel& sharded, StageLink* link,
                         std::function<void(Tape&)> prepare_tape)
    : model_(model),
      sharded_(sharded),
      link_(link),
      layered_(dynamic_cast<nn::LayeredModel*>(&model)),
      flights_(sharded, std::move(prepare_tape)) {}

void ChunkRunner::begin(const StageLayout& layout, std::int64_t last) {
  layout_ = &layout;
  last_ = last;
}

void ChunkRunner::finish() {
  require(flights_.empty() && outputs_.empty() && input_gradients_.empty() && gathered_.empty(),
          "a list of instructions has ended, and not all of its micro-batches have come back");
  if (link_) link_->finish();
}

/// Takes what another chunk has given: on this rank, or through a channel.
Tensor ChunkRunner::value_of(std::map<Key, Tensor>& given, const Key& giver, StageChannel* channel,
                             const Key& taker) {
  if (!channel) {
    auto node = given.extract(giver);
    require(!node.empty(), "chunk ", giver.second, " has nothing of micro-batch ", giver.first,
            " to give: its forward, or backward, comes first");
    return std::move(node.mapped());
  }
  const auto start = std::chrono::steady_clock::now();
  Tensor value = channel->take(taker);
  waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return value;
}

Var ChunkRunner::run(Tape& tape, const Chunk& chunk, const Var& input, const tensor::Batch& batch) const {
  const bool whole = !layered_ || (chunk.begin == 0 && chunk.end == layered_->parts());
  return whole ? model_(tape, batch) : layered_->run(tape, chunk.begin, chunk.end, input, batch);
}

Var ChunkRunner::forward(const Instruction& i, const tensor::Batch& batch, const RandomKey& random) {
  Tensor input;
  if (!layout_->has_first(i.chunk))
    input =
        value_of(outputs_, {i.micro_batch, i.chunk - 1}, link_ ? &link_->activations() : nullptr, key_of(i));
  hold(i);
  Flight& flight = flights_.begin(i.micro_batch, i.chunk, parts_of(i), i.micro_batch == last_);
  Tape& tape = flight.pass->tape();
  tape.random = random;
  if (i.keeps_activations) tape.recompute = Recompute::none;
  if (input.defined()) flight.input = tape.variable(std::move(input));
  flight.output = run(tape, parts_of(i), flight.input, batch);
  const bool hands_on = !layout_->has_last(i.chunk);
  if (hands_on)
    outputs_[key_of(i)] = flight.output.value();  // before the input's is dropped: they may be one
  if (flight.input.defined()) flight.input.drop_value();
  if (hands_on) flight.output.drop_value();
  return flight.output;
}

void ChunkRunner::set_loss(const Instruction& i, const Var& loss) {
  flight_of(i).output = loss;
}

void ChunkRunner::begin_backward(const Instruction& i, double seed) {
  const WeightGradients when =
      i.op == Instruction::Op::backward_input ? WeightGradients::later : WeightGradients::now;
  hold(i);
  Flight& flight = flight_of(i);
  if (layout_->has_last(i.chunk)) return flight.pass->begin_backward(flight.output, seed, when);
  flight.pass->tape().loss_seed = seed;
  Tensor gradient = value_of(input_gradients_, {i.micro_batch, i.chunk + 1},
                             link_ ? &link_->gradients() : nullptr, key_of(i));
  std::vector<autograd::OutputGradient> outputs;
  if (flight.output.requires_grad())  // not where the model begins with frozen parts
    outputs.push_back({flight.output, std::move(gradient)});
  flight.pass->begin_backward(outputs, when);
}

bool ChunkRunner::continue_backward(const Instruction& i) {
  return flight_of(i).pass->continue_backward();
}

void ChunkRunner::end_backward(const Instruction& i) {
  Flight& flight = flight_of(i);
  if (flight.input.defined()) {
    require(flight.input.grad().defined(), "part ", parts_of(i).begin,
            " of the model gives no gradient to what the part before it gives: each part takes the value of "
            "the one before");
    input_gradients_[key_of(i)] = flight.input.grad();
  }
  flight.input = flight.output = {};
  if (i.op == Instruction::Op::backward) flights_.end(flight);
}

bool ChunkRunner::continue_weight_gradients(const Instruction& i) {
  return flight_of(i).pass->continue_weight_gradients();
}

void ChunkRunner::end_weight_gradients(const Instruction& i) {
  flights_.end(flight_of(i));
}

void ChunkRunner::transfer(const Instruction& i) {
  require(link_, "a list of one stage neither sends nor receives");
  const auto given = [&](std::map<Key, Tensor>& values) {
    return value_of(values, key_of(i), nullptr, key_of(i));
  };
  switch (i.op) {
    case Instruction::Op::receive_activation:
      return link_->activations().receive(key_of(i));
    case Instruction::Op::send_activation:
      return link_->activations().send(key_of(i), given(outputs_));
    case Instruction::Op::receive_gradient:
      return link_->gradients().receive(key_of(i));
    case Instruction::Op::send_gradient:
      return link_->gradients().send(key_of(i), given(input_gradients_));
    default:
      fail(ErrorKind::usage, "an instruction that moves nothing");
  }
}

void ChunkRunner::gather(const Instruction& i) {
  Gathered gathered{sharded_.units_of(parts_of(i)), {}};
  for (sharding::Unit* unit : gathered.units) {
    if (unit->on_demand())
      sharded_.let_stay(*unit, true);
    else
      sharded_.gather_ahead(*unit);
  }
  gathered_[i.chunk] = std::move(gathered);
}

void ChunkRunner::hold(const Instruction& i) {
  const auto at = gathered_.find(i.chunk);
  if (at == gathered_.end() || !at->second.leases.empty()) return;
  for (sharding::Unit* unit : at->second.units)
    if (!unit->on_demand()) at->second.leases.push_back(unit->gather());
}

void ChunkRunner::release(const Instruction& i) {
  const auto at = gathered_.find(i.chunk);
  if (at == gathered_.end()) return;
  for (sharding::Unit* unit : at->second.units)
    if (unit->on_demand()) sharded_.let_stay(*unit, false);
  gathered_.erase(at);
}

bool ChunkRunner::holds(const sharding::Segment& segment) const {
  for (const auto& [chunk, gathered] : gathered_)
    for (const sharding::Unit* unit : gathered.units)
      for (const auto& own : unit->segments())
        if (own.get() == &segment) return true;
  return false;
}

void ChunkRunner::drop() {
  outputs_.clear();
  input_gradients_.clear();
  flights_.drop();
  gathered_.clear();
}

}  // namespace sherd::engine

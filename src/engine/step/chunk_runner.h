#pragma once

#include <map>
#include <memory>
#include <vector>

#include "engine/pipeline/stage_link.h"
#include "engine/pipeline/train_schedule.h"
#include "engine/step/flights.h"
#include "nn/layered_model.h"

namespace sherd::engine {

/// Runs the chunks of a model that a rank has on micro-batches, forward and backward, and hands on what they
/// give to each other: here, or to the stages beside this one. What it is told follows a list of
/// instructions, which each of its calls takes one of. Used from the rank's thread.
class ChunkRunner {
 public:
  /// All must outlive it. `link`: null with one stage.
  ChunkRunner(nn::Model& model, sharding::ShardedModel& sharded, StageLink* link,
              std::function<void(autograd::Tape&)> prepare_tape);

  using Instruction = sharding::Instruction;
  /// Before a list. `last`: the step's last micro-batch; −1 where another list has it. `layout` must outlive
  /// the list.
  void begin(const StageLayout& layout, std::int64_t last);
  /// After it: all transfers have ended. Throws Error{usage} where the list has left something undone.
  void finish();

  // ---- the instructions ----
  /// Runs the chunk; what it gives, the loss at the model's end. Waits for its input where that comes from
  /// another stage.
  autograd::Var forward(const Instruction& instruction, const tensor::Batch& batch, const RandomKey& random);
  /// Says what the backward of the micro-batch is to begin from, instead of the model's own loss.
  void set_loss(const Instruction& instruction, const autograd::Var& loss);
  /// `seed`: d loss.
  void begin_backward(const Instruction& instruction, double seed);
  /// Runs on until a block's backward has ended; false once nothing is left.
  bool continue_backward(const Instruction& instruction);
  void end_backward(const Instruction& instruction);
  /// The same of weight gradients that backward has put off.
  bool continue_weight_gradients(const Instruction& instruction);
  void end_weight_gradients(const Instruction& instruction);
  /// A send or a receive.
  void transfer(const Instruction& instruction);
  /// The chunk's parameters begin to come; whatever needs them waits.
  void gather(const Instruction& instruction);
  void release(const Instruction& instruction);

  /// The segment's unit is gathered for a chunk that was not released yet.
  bool holds(const sharding::Segment& segment) const;
  /// How long calls have waited for other stages since the last call of this, in seconds.
  double take_waited() { return std::exchange(waited_, 0.0); }

  /// Lets go of everything that it holds itself, after an exception.
  void drop();
  /// Takes back what an exception has left of passes and leases. Throws what their transfers fail with.
  void recover() { flights_.recover(); }

 private:
  using Key = StageChannel::Key;
  static Key key_of(const Instruction& i) { return {i.micro_batch, i.chunk}; }
  Flight& flight_of(const Instruction& i) { return flights_.at(i.micro_batch, i.chunk); }
  const sharding::Chunk& parts_of(const Instruction& i) const { return layout_->own(i.chunk); }
  tensor::Tensor value_of(std::map<Key, tensor::Tensor>& given, const Key& giver, StageChannel* channel,
                          const Key& taker);
  void hold(const Instruction& instruction);
  autograd::Var run(autograd::Tape& tape, const sharding::Chunk& chunk, const autograd::Var& input,
                    const tensor::Batch& batch) const;

  nn::Model& model_;
  sharding::ShardedModel& sharded_;
  StageLink* link_;
  nn::LayeredModel* layered_;  ///< the model, where it has parts
  Flights flights_;
  const StageLayout* layout_ = nullptr;
  std::int64_t last_ = -1;
  /// Values that chunks have given and nobody has taken, by who gave them: values, and gradients of their
  /// inputs.
  std::map<Key, tensor::Tensor> outputs_, input_gradients_;
  struct Gathered {
    std::vector<sharding::Unit*> units;
    std::vector<sharding::Unit::Lease> leases;  ///< from the first use on
  };
  std::map<int, Gathered> gathered_;  ///< by chunk
  double waited_ = 0;
};

}  // namespace sherd::engine

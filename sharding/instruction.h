#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace sherd::sharding {

/// A run of a model's parts (nn::LayeredModel) that one rank computes at once: [begin, end). Of a model
/// without parts: the whole of it, [0, 1).
struct Chunk {
  std::size_t begin = 0, end = 1;
  bool operator==(const Chunk&) const = default;
};

/// One thing that a rank does for a step. All ranks run lists that fit together, each from its thread, in
/// order.
///
/// A rank's chunks count from 0; chunk c of stage s is number c · stages + s of the model's. Between two
/// chunks of one rank values stay there; else they travel: a receive only begins it, and whoever needs the
/// value waits. Values of one kind (activations, gradients) that go from one stage to another arrive in the
/// order in which they were sent. They must not wait for values of the other kind, nor for those that come
/// back: with two stages both directions join the same pair of ranks.
struct Instruction {
  enum class Op : std::uint8_t {
    update_chunk,        ///< does the rest of the chunk's update of the step before; micro_batch −1
    gather,              ///< the chunk's parameters begin to come, and stay until `release`; micro_batch −1
    release,             ///< micro_batch −1
    receive_activation,  ///< the chunk's input begins to come from the stage before
    forward,             ///< runs the chunk on the micro-batch
    send_activation,     ///< the chunk's output begins to go to the stage behind
    share_loss,          ///< ranks tell each other the losses of the step; nobody waits for it yet
    begin_update,        ///< states begin to come; from here on a parameter may change once its gradients are
                         ///< complete
    receive_gradient,    ///< the gradient of the chunk's output begins to come from the stage behind
    backward,            ///< gradients; those that are complete are sent off, and updated where an update has
                         ///< begun
    backward_input,    ///< the same but for the weights of products, whose gradients `weight_gradients` forms
    send_gradient,     ///< the gradient of the chunk's input begins to go to the stage before
    weight_gradients,  ///< forms the gradients that backward_input has put off
    reduce,            ///< all gradients that were sent off are summed: waits for them
    count,             ///< the micro-batch is done
    update             ///< clips, updates what is left (or leaves it to update_chunk), publishes parameters
  };
  Op op;
  std::int64_t micro_batch;        ///< counts from 0 in the step; the last one for what is done once per step
  int chunk = 0;                   ///< counts this rank's; 0 for what concerns no chunk
  bool keeps_activations = false;  ///< forward alone: nothing is recomputed (keep_activations())
  bool operator==(const Instruction&) const = default;
};

/// "receive_activation"
std::string_view name_of(Instruction::Op op);

/// The shape that a schedule is made for: one stage of a pipeline; without one, the only stage.
struct ScheduleShape {
  int stages = 1, stage = 0;       ///< stage in [0, stages)
  int chunks = 1;                  ///< per stage (virtual stages; with `layered`, the parts of the model)
  std::int64_t micro_batches = 1;  ///< per step
  /// With `interleaved`, so many micro-batches pass a chunk before the next one's turn; 0: as many as stages.
  std::int64_t group = 0;
  bool early_update = false;  ///< nothing decides about the update but the loss: it begins beside the last
                              ///< micro-batch's backward
  bool late_update = false;   ///< the update may go on beside the next step's forward (`update_chunk`)
};

/// The list of `accumulate` for one micro-batch of a step. A step is these lists, one after the other, up to
/// the one that `ends_step`. With `early_update` nothing decides about the update but the loss, so it begins
/// beside that backward. A pure function, as all here are.
std::vector<Instruction> accumulate(std::int64_t micro_batch, bool ends_step, bool early_update);

}  // namespace sherd::sharding

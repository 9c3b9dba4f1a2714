#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "device/stream.h"
#include "sharding/instruction.h"
#include "sharding/pass.h"
#include "tensor/tensor.h"

namespace sherd::engine {

/// One micro-batch's way through one chunk of the model, from its forward until its last weight gradient.
struct Flight {
  std::int64_t micro_batch = 0;
  int chunk = 0;
  std::unique_ptr<sharding::Pass> pass;
  autograd::Var input;   ///< the output of the chunk before; undefined for the model's first chunk
  autograd::Var output;  ///< for the model's last chunk the loss
};

/// All flights under way on a rank, as many as its list of instructions keeps at once. Their passes come from
/// a pool. Used from the rank's thread.
class Flights {
 public:
  /// `prepare` sets up the tape of each new pass. The model must outlive it.
  Flights(sharding::ShardedModel& model, std::function<void(autograd::Tape&)> prepare)
      : model_(model), prepare_(std::move(prepare)) {}

  /// Begins the pass of a micro-batch through a chunk, which is `parts`. `last`: it is the last micro-batch
  /// of its step.
  Flight& begin(std::int64_t micro_batch, int chunk, const sharding::Chunk& parts, bool last);
  /// The flight under way; Error{usage} where there is none.
  Flight& at(std::int64_t micro_batch, int chunk);
  /// Ends a flight whose gradients are complete; its pass goes back to the pool.
  void end(const Flight& flight);
  bool empty() const { return under_way_.empty(); }
  /// Drops all flights, after an exception: at once what their tapes hold, and their leases once the next
  /// flight begins or recover() is called.
  void drop();
  /// Takes back what dropped flights have left open, and throws what their transfers fail with. Does nothing
  /// where none were dropped.
  void recover();

 private:
  std::unique_ptr<sharding::Pass> take_pass();

  sharding::ShardedModel& model_;
  std::function<void(autograd::Tape&)> prepare_;
  std::deque<Flight> under_way_;
  std::deque<std::unique_ptr<sharding::Pass>> idle_;
  bool dropped_ = false;
};

/// The rank's thread queues micro-batch after micro-batch and looks at results once per step; on CPUs
/// everything has happened when a call returns. This holds it back where it is so far ahead of an accelerator
/// that more would gain nothing: what is queued keeps page-locked memory (inputs, losses) until the device
/// has passed. Counts what a micro-batch does on a chunk of the model, forward and backward apart, in
/// whatever order a schedule has them.
class RunAhead {
 public:
  static constexpr std::size_t most = 4;  ///< micro-batches under way, or as much of others

  explicit RunAhead(device::Device& device) : device_(device) {}
  /// Before forward or backward of a chunk is queued, of which the rank has `chunks`: waits until less than
  /// `most` micro-batches' are under way.
  void begin(int chunks);
  /// All of it has been queued.
  void end();

 private:
  device::Device& device_;
  std::deque<device::Event> under_way_;
};

}  // namespace sherd::engine

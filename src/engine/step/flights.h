#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "sharding/instruction.h"
#include "sharding/pass.h"

namespace sherd::engine {

/// One micro-batch's way through one chunk of the model, from its forward until its last weight gradient.
struct Flight {
  std::int64_t micro_batch = 0;
  int chunk = 0;
  std::unique_ptr<sharding::Pass> pass;
  autograd::Var input;   ///< what the chunk before gave; undefined where the chunk is the model's first
  autograd::Var output;  ///< of the model's last chunk: the loss
};

/// All that are under way on a rank, as many as its list of instructions keeps so. Their passes come from a
/// pool. Used from the rank's thread.
class Flights {
 public:
  /// `prepare` sets up the tape of each new pass. The model must outlive it.
  Flights(sharding::ShardedModel& model, std::function<void(autograd::Tape&)> prepare)
      : model_(model), prepare_(std::move(prepare)) {}

  /// Begins the pass of a micro-batch through a chunk, which is `parts`. `last`: it is the last micro-batch
  /// of its step.
  Flight& begin(std::int64_t micro_batch, int chunk, const sharding::Chunk& parts, bool last);
  /// The one under way; Error{usage} where there is none.
  Flight& at(std::int64_t micro_batch, int chunk);
  /// Its gradients are complete; the pass goes back to the pool.
  void end(const Flight& flight);
  bool empty() const { return under_way_.empty(); }
  /// Lets go of all, after an exception: what their tapes hold, and what they leased once the next one begins
  /// or recover() is called.
  void drop();
  /// Takes back what dropped ones have left open. Throws what their transfers fail with. Nothing otherwise.
  void recover();

 private:
  std::unique_ptr<sharding::Pass> take_pass();

  sharding::ShardedModel& model_;
  std::function<void(autograd::Tape&)> prepare_;
  std::deque<Flight> under_way_;
  std::deque<std::unique_ptr<sharding::Pass>> idle_;
  bool dropped_ = false;
};

}  // namespace sherd::engine

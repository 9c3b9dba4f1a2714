#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "nn/module.h"
#include "nn/step_state.h"

namespace sherd::engine {

/// Ends the steps of modules that learn once per step outside of gradients (nn::StepState), on one rank, with
/// the sums over ranks. Used from the rank's thread.
class StepStates {
 public:
  /// All must outlive it. `ranks`: all that take part in the step. `first`: whether this is the first of the
  /// tensor ranks with the same tokens, which count alike: its counts are the ones that are taken.
  StepStates(nn::Module& model, comm::Communicator& ranks, bool first, device::Device& device);
  /// Collective where the model has such modules, else nothing: one exchange for all of them.
  void end_step(bool applied);
  /// Drops what was counted since the last step.
  void drop_step();

 private:
  std::vector<nn::StepState*> modules_;
  comm::Communicator& ranks_;
  bool first_;
  device::Device& device_;
};

/// The values of such modules as checkpoints hold them, by path. Ranks, and stages of a pipeline, have the
/// same.
using SavedStepStates = std::map<std::string, std::vector<float>>;
SavedStepStates save_step_states(nn::Module& model);
/// Throws Error{data} where a module has another number of values than was saved.
void require_step_states(nn::Module& model, const SavedStepStates& saved);
/// Called after require_step_states(). Modules of which nothing was saved stay as they are. Returns a line on
/// these, and one on saved states that no module takes, where there are any.
std::vector<std::string> restore_step_states(nn::Module& model, const SavedStepStates& saved);

}  // namespace sherd::engine

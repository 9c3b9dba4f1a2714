#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/collective.h"
#include "config/config.h"
#include "engine/engine.h"
#include "engine/model_source.h"
#include "engine/pipeline/stage_layout.h"
#include "tensor/kernel_work.h"

namespace sherd::engine {

/// Gives the tensors of one micro-batch on a device; nobody looks at their content.
using MakeBatch = std::function<tensor::Batch(device::Device&)>;

/// The rank to play, and its world.
struct DryRank {
  int ranks = 1;        ///< world size
  int local_ranks = 1;  ///< on each machine: they share its cores
  int rank = 0;
};

/// Told of all that a dry run does, in order; both or none.
struct WorkListeners {
  tensor::TellKernelWork kernels{};
  comm::TellCommWork calls{};
};

/// The real engine on a meta device, among ranks that are not there: its steps charge and tell what a run's
/// would, and compute, move and write nothing. The limits of the configuration do not stop it. Throws what
/// building the engine throws.
class DryRun {
 public:
  DryRun(const config::Config& config, const ModelSource& model, const MakeBatch& batch, const DryRank& rank,
         const WorkListeners& listeners = {});

  Engine& engine() { return *engine_; }
  tensor::Batch batch() { return batch_(engine_->device()); }
  /// One step by train_batch().
  void step() {
    before_step();
    engine_->train_batch([this] { return batch(); });
  }
  /// One of the passes of a micro-batch that preferences run before each step (passes_before_step()), or
  /// nothing: the reference's, where it has one.
  void before_step();
  /// The engine that runs it.
  Engine& reference() { return copy_ ? *copy_ : *engine_; }
  void evaluate() { engine_->eval_batch(batch()); }
  /// As Engine::assume_values(), of all engines here.
  void assume_values(const std::vector<ValueForm>& of_parts) {
    engine_->assume_values(of_parts);
    if (copy_) copy_->assume_values(of_parts);
  }
  /// The form of the output of each part of the model but the last; for a LayeredModel that one stage has
  /// whole.
  std::vector<ValueForm> forms_of_parts();

 private:
  MakeBatch batch_;
  std::unique_ptr<Engine> engine_, copy_;  ///< the latter: of config::Reference::copy
};

}  // namespace sherd::engine

#pragma once

#include "engine/pipeline/stage_link.h"
#include "engine/pipeline/train_schedule.h"
#include "nn/layered_model.h"

namespace sherd::engine {

/// Runs a model whole over the stages of a pipeline, for evaluation and generation: one stage after the
/// other. Used from the rank's thread.
class ModelStages final : public nn::Stages {
 public:
  /// `group`: the ranks that hold the stages, in order. Takes the model's place for stages until it goes;
  /// all must outlive it.
  ModelStages(nn::LayeredModel& model, const StageLayout& layout, comm::Communicator& group);
  ~ModelStages() override;
  ModelStages(const ModelStages&) = delete;
  ModelStages& operator=(const ModelStages&) = delete;

  bool has(std::size_t part) const override { return layout_.stage_of(part) == layout_.stage; }
  autograd::Var cross(autograd::Tape& tape, std::size_t part, const autograd::Var& x) override;
  tensor::Tensor from_last(autograd::Tape& tape, const tensor::Tensor& value) override;

 private:
  nn::LayeredModel& model_;
  const StageLayout& layout_;
  comm::Communicator& group_;
};

}  // namespace sherd::engine

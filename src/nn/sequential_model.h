#pragma once

#include "nn/layered_model.h"

namespace sherd::nn {

/// Layers one after the other, between an input and a loss; each layer is a part and a block. What DeepSpeed
/// calls PipelineModule(layers, loss_fn). Parameters are named as in PyTorch's nn.Sequential: "0.weight", ...
class SequentialModel : public LayeredModel {
 public:
  /// What the first layer takes of a batch, as tape.input(batch.at("x")).
  using Input = std::function<Var(Tape& tape, const tensor::Batch& batch)>;
  /// The mean loss, a scalar, of what the last layer gives.
  using Loss = std::function<Var(const Var& y, const tensor::Batch& batch)>;
  /// At least one layer.
  SequentialModel(const std::vector<std::shared_ptr<Layer>>& layers, Input input, Loss loss);
  /// What the last layer gives, a prediction; undefined on a pipeline's stages but the last.
  Var outputs(Tape& tape, const tensor::Batch& batch);

 protected:
  Var forward_part(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch) override;

 private:
  Var run_layer(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch);

  std::vector<std::shared_ptr<Layer>> layers_;
  Input input_;
  Loss loss_;
};

}  // namespace sherd::nn

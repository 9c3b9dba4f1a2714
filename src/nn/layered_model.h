#pragma once

#include "nn/module.h"

namespace sherd::nn {

/// The stages of a pipeline: which rank has which part of a model, and how values get from one stage to the
/// next. Evaluation and generation, which run a model whole, go through it; training sends and receives as
/// its schedule says.
class Stages {
 public:
  virtual ~Stages() = default;
  /// This rank computes part `part`.
  virtual bool has(std::size_t part) const = 0;
  /// Called by every rank between parts `part` − 1 and `part`, in order: `x` is what part − 1 gave, and
  /// undefined on ranks that do not have it. Gives it to the rank that has `part`; undefined elsewhere. On a
  /// tape that does not record. Collective over the two ranks.
  virtual Var cross(Tape& tape, std::size_t part, const Var& x) = 0;
  /// The value of the rank with the last part, on all stages; its shape and dtype need not be known
  /// elsewhere. Collective.
  virtual tensor::Tensor from_last(Tape& tape, const tensor::Tensor& value) = 0;
};

/// A model that is an ordered list of parts, between which schedules may cut it: ranks hold stages of it
/// (pipeline parallelism), or all micro-batches pass a part before the next one (layered accumulation). One
/// value goes from each part to the next. Other models train on the schedule `accumulate` only.
class LayeredModel : public Model {
 public:
  /// Parts follow each other; at least one.
  std::size_t parts() const { return parts_.size(); }
  /// The modules of part `part`. A part of one block is that block; the parameters of another part, outside
  /// of blocks, form a unit of sharding. A parameter that several parts use is tied between them.
  const std::vector<std::shared_ptr<Module>>& modules(std::size_t part) const {
    return parts_.at(part).modules;
  }
  /// Runs parts [begin, end), all of which this rank has, on `x`, the output of part begin − 1 (undefined for
  /// the first part). Gives what part end − 1 gives; the last part gives the mean loss, a scalar.
  Var run(Tape& tape, std::size_t begin, std::size_t end, Var x, const tensor::Batch& batch);

  /// Entered and left around a part that is no block of its own; set by the sharding room.
  void set_part_scope(std::size_t part, std::shared_ptr<autograd::Scope> scope) {
    parts_.at(part).scope = std::move(scope);
  }
  /// Null: this rank has all parts. Must outlive its use; set by the engine.
  void set_stages(Stages* stages) { stages_ = stages; }
  Stages* stages() const { return stages_; }

 protected:
  /// Declares the next part, made of modules that were added before. Modules of parts hold all parameters of
  /// a model that is cut.
  void append_part(std::vector<std::shared_ptr<Module>> modules);
  /// Part `part` of forward(). Reads of `batch` what it needs: a rank gives the batch to the first and the
  /// last part, and an empty one to others.
  virtual Var forward_part(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch) = 0;
  /// Runs `body` as a part of that number, under its scope: for outputs other than the loss, such as logits.
  Var run_part(Tape& tape, std::size_t part, const std::function<Var()>& body);
  /// Parts [0, end) on whatever ranks have them: the output of part end − 1, on the rank that has part `end`
  /// (or, where that is all, part end − 1); undefined elsewhere.
  Var run_to(Tape& tape, std::size_t end, const tensor::Batch& batch);
  /// All parts; the loss, undefined on ranks without the last part.
  Var forward(Tape& tape, const tensor::Batch& batch) final { return run_to(tape, parts(), batch); }

 private:
  struct Part {
    std::vector<std::shared_ptr<Module>> modules;
    std::shared_ptr<autograd::Scope> scope;
  };
  std::vector<Part> parts_;
  Stages* stages_ = nullptr;
};

/// Layers one after the other, between an input and a loss; each layer is a part and a block. What DeepSpeed
/// calls PipelineModule(layers, loss_fn). Parameters are named as in PyTorch's nn.Sequential: "0.weight", ...
class SequentialModel : public LayeredModel {
 public:
  /// The input of the first layer, from a batch, as tape.input(batch.at("x")).
  using Input = std::function<Var(Tape& tape, const tensor::Batch& batch)>;
  /// The mean loss, a scalar, of what the last layer gives.
  using Loss = std::function<Var(const Var& y, const tensor::Batch& batch)>;
  /// At least one layer.
  SequentialModel(const std::vector<std::shared_ptr<Layer>>& layers, Input input, Loss loss);
  /// The output of the last layer, a prediction; undefined on a pipeline's stages but the last.
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

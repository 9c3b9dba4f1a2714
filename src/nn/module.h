#pragma once

// This room has modules with named parameters, and serial layers.
//
// To change, look at:
// - what forms a block, whose parameters come and go together: mark_block(); what a pass may leave out:
//   mark_on_demand()
// - models that are lists of parts, which pipelines cut: layered_model.h
// - what modules learn once per step outside of gradients: StepState, step_state.h
// - where weights to begin with come from: WeightSource
// - dropout's random numbers: layers.cpp (Dropout); the operation: autograd/dropout.cpp

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/tape.h"

namespace sherd::nn {

using autograd::Init;
using autograd::ParameterPtr;
using autograd::Tape;
using autograd::Var;
using tensor::Shape;

/// All that a module says about a parameter beside name, shape and initialiser.
struct Attributes {
  bool trainable = true;
  bool decay = true;
};

/// A part of a model: declares named parameters and holds children. Declaring costs no memory; storage comes
/// from whoever shards the model (sharding/), so a model can be built that fits on no single rank.
///
/// Not synchronised: a rank builds and runs its own copy on its own thread.
class Module {
 public:
  virtual ~Module() = default;
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Full dotted path, empty for the root. Valid after assign_names.
  const std::string& path() const { return path_; }

  /// Every parameter of this module and below, each once (a tied one at its first name), in declaration
  /// order.
  std::vector<ParameterPtr> parameters() const;
  /// Every (path, parameter) pair, tied ones under each of their names.
  std::vector<std::pair<std::string, ParameterPtr>> named_parameters() const;
  /// Calls visit on this module and everything below, parents first.
  void for_each(const std::function<void(Module&)>& visit);
  const std::vector<std::pair<std::string, std::shared_ptr<Module>>>& children() const { return children_; }
  /// Parameters declared by this very module.
  const std::vector<std::pair<std::string, ParameterPtr>>& own_parameters() const { return parameters_; }

  /// Gives paths to modules and names to parameters; called once by whoever stores the model. Throws
  /// Error{usage} on a name that occurs twice.
  void assign_names(const std::string& prefix = "");

  /// Makes this module a unit of sharding, prefetch and recompute (children of a LayerList are so by
  /// default), or takes that back.
  void mark_block(bool block = true) { block_ = block; }
  bool is_block() const { return block_; }
  /// Says of a block that passes may leave it out, as they do experts without tokens: it is gathered where it
  /// runs, or is announced (autograd::Scope::announce()), and expected nowhere. All ranks run the same ones.
  void mark_on_demand() { on_demand_ = true; }
  bool is_on_demand() const { return on_demand_; }
  /// Whether a block recomputes where the tape says so (default), or keeps all that is made within it. Set by
  /// the engine.
  void set_recomputes(bool recomputes) { recomputes_ = recomputes; }
  /// No gradient for any parameter of this module and below.
  void freeze();

  /// Set by the sharding room; entered and left by the module's call operator.
  void set_scope(std::shared_ptr<autograd::Scope> scope) { scope_ = std::move(scope); }
  const std::shared_ptr<autograd::Scope>& scope() const { return scope_; }

 protected:
  ParameterPtr declare(const std::string& name, const Shape& shape, Init init, Attributes attributes = {});
  /// Uses a parameter that another module declared (tied weights).
  ParameterPtr share(const std::string& name, ParameterPtr parameter);
  template <class M>
  std::shared_ptr<M> add(const std::string& name, std::shared_ptr<M> child) {
    adopt(name, child);
    return child;
  }
  /// Runs body(tape, inputs) as this module's forward: under its scope, and, for blocks under full recompute,
  /// keeping only the inputs (those that do so: set_recomputes()).
  Var run(Tape& tape, const std::vector<Var>& inputs,
          const std::function<Var(Tape&, const std::vector<Var>&)>& body);

 private:
  void adopt(const std::string& name, std::shared_ptr<Module> child);

  std::string path_;
  std::vector<std::pair<std::string, ParameterPtr>> parameters_;
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> children_;
  std::shared_ptr<autograd::Scope> scope_;
  bool block_ = false, on_demand_ = false, recomputes_ = true;
};

/// A module with one input and one output.
class Layer : public Module {
 public:
  Var operator()(Tape& tape, const Var& x);

 protected:
  virtual Var forward(Tape& tape, const Var& x) = 0;
};

/// A whole model: takes a micro-batch and gives the scalar loss. Everything outside its blocks forms its own
/// unit.
class Model : public Module {
 public:
  Var operator()(Tape& tape, const tensor::Batch& batch);

 protected:
  virtual Var forward(Tape& tape, const tensor::Batch& batch) = 0;
};

/// A list of layers, run one after the other; each is a block unless it says otherwise.
class LayerList : public Layer {
 public:
  /// Appends `layer` under its index.
  template <class L>
  std::shared_ptr<L> append(std::shared_ptr<L> layer) {
    layer->mark_block();
    layers_.push_back(layer);
    return add(std::to_string(layers_.size() - 1), std::move(layer));
  }
  std::size_t size() const { return layers_.size(); }
  Layer& operator[](std::size_t i) { return *layers_[i]; }

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  std::vector<std::shared_ptr<Layer>> layers_;
};

}  // namespace sherd::nn

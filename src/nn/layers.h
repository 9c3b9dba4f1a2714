#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "nn/module.h"
#include "tensor/kernels.h"
#include "tensor/slice.h"

// The layers of this room: modules with parameters around operations of autograd/ops.h.
namespace sherd::nn {

struct LinearOptions {
  bool bias = true;
  tensor::Activation activation = tensor::Activation::none;  ///< fused into the product
  std::optional<Init> init{};   ///< the weight's first values; by default uniform in ±1/√in
  autograd::Packing packing{};  ///< how the weight's outputs, and the bias's, are packed
  ParameterPtr tied{};          ///< use this weight, shape [out, in], of another module
  bool fp8 = true;              ///< its products may run in FP8; a tied weight's as where it is declared
};

/// act(x·weightᵀ + bias). Parameters: "weight" [out, in]; "bias" [out], zero at first unless `init` is left
/// to the default, which draws it like the weight; no weight decay on it.
class Linear : public Layer {
 public:
  Linear(std::int64_t in, std::int64_t out, LinearOptions options = {});
  const ParameterPtr& weight() const { return weight_; }
  const ParameterPtr& bias() const { return bias_; }  ///< null without one

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  tensor::Activation activation_;
  ParameterPtr weight_, bias_;
};

/// A layer that applies a function of autograd/ops.h to x: `Function(autograd::tanh)`.
class Function : public Layer {
 public:
  explicit Function(std::function<Var(const Var&)> function) : function_(std::move(function)) {}

 protected:
  Var forward(Tape&, const Var& x) override { return function_(x); }

 private:
  std::function<Var(const Var&)> function_;
};

/// autograd::layer_norm with parameters "weight" (ones) and, unless asked for none, "bias" (zeros), [width],
/// both without weight decay.
class LayerNorm : public Layer {
 public:
  explicit LayerNorm(std::int64_t width, double eps = 1e-5, bool bias = true);

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  double eps_;
  ParameterPtr weight_, bias_;  ///< bias_ null: none
};

/// autograd::rms_norm with parameter "weight", [width], without weight decay; it begins so that weight +
/// shift is 1.
class RmsNorm : public Layer {
 public:
  explicit RmsNorm(std::int64_t width, double eps = 1e-5, double shift = 0);

  const ParameterPtr& weight() const { return weight_; }

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  double eps_, shift_;
  ParameterPtr weight_;
};

/// A table of vectors by id. Parameter: "weight" [rows, width], normal(0, 1) at first unless said otherwise.
class Embedding : public Module {
 public:
  Embedding(std::int64_t rows, std::int64_t width, Init init = Init::normal(0, 1));
  /// ids: int32 of any shape; the result: [ids..., width]. Throws Error{data} for an id outside the table.
  Var operator()(Tape& tape, const tensor::Tensor& ids);
  const ParameterPtr& weight() const { return weight_; }

 private:
  ParameterPtr weight_;
};

/// Learned absolute positions: adds row s to every x[b, s, :]. Parameter: "weight" [max_positions, width].
class LearnedPositions : public Layer {
 public:
  LearnedPositions(std::int64_t max_positions, std::int64_t width, Init init = Init::normal(0, 0.02));
  /// Adds row positions.at(s) to x[b, s, :], where x holds those rows of sequences.
  Var add_to(Tape& tape, const Var& x, const tensor::Positions& positions);
  /// Adds row ids[b, s] to x[b, s, :]; ids: int32 [batch, seq].
  Var add_rows(Tape& tape, const Var& x, const tensor::Tensor& ids);
  const ParameterPtr& weight() const { return weight_; }

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  ParameterPtr weight_;
};

/// Zeroes elements with probability p while the tape trains, and scales the rest by 1/(1-p). The mask is a
/// function of the tape's stream and of this module's path, so it does not depend on what else a model
/// computes, or in which order; a module that runs twice in one forward pass drops the same elements twice.
class Dropout : public Layer {
 public:
  explicit Dropout(float p);
  /// dropout(x), where x holds these elements of a logical tensor, whose mask they get; by default all of it.
  Var apply(Tape& tape, const Var& x, const tensor::Slice& elements = {});
  /// residual + dropout(x) in one pass.
  Var add_to(Tape& tape, const Var& x, const Var& residual, const tensor::Slice& elements = {});
  /// This module's stream. Throws Error{usage} before assign_names has given it a path.
  RandomKey key(const Tape& tape) const;
  float p() const { return p_; }

 protected:
  Var forward(Tape& tape, const Var& x) override { return apply(tape, x); }

 private:
  bool idle(const Tape& tape) const { return p_ == 0.0f || !tape.training; }
  float p_;
};

}  // namespace sherd::nn

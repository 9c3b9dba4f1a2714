#pragma once

#include "nn/module.h"

namespace sherd::nn {

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
class Positions : public Layer {
 public:
  Positions(std::int64_t max_positions, std::int64_t width, Init init = Init::normal(0, 0.02));
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

}  // namespace sherd::nn

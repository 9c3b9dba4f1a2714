#pragma once

#include "nn/module.h"
#include "tensor/slice.h"

namespace sherd::nn {

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

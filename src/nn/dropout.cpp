#include "nn/dropout.h"

#include "autograd/dropout.h"
#include "autograd/elementwise.h"

namespace sherd::nn {

Dropout::Dropout(float p) : p_(p) {
  require(p >= 0.0f && p < 1.0f, "the dropout probability must be in [0, 1), not ", p);
}

RandomKey Dropout::key(const Tape& tape) const {
  require(!path().empty(),
          "a dropout layer names its stream after its path: call assign_names() on the model first");
  return tape.random.at(stable_hash(path()));
}

Var Dropout::add_to(Tape& tape, const Var& x, const Var& residual, const tensor::Slice& elements) {
  return idle(tape) ? autograd::add(x, residual)
                    : autograd::dropout_add(x, residual, p_, key(tape), elements);
}

Var Dropout::apply(Tape& tape, const Var& x, const tensor::Slice& elements) {
  return idle(tape) ? x : autograd::dropout(x, p_, key(tape), elements);
}

}  // namespace sherd::nn

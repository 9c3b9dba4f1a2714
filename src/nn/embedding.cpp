#include "nn/embedding.h"

#include "autograd/elementwise.h"
#include "autograd/embedding.h"

namespace sherd::nn {

Embedding::Embedding(std::int64_t rows, std::int64_t width, Init init)
    : weight_(declare("weight", {rows, width}, init)) {
  require(rows > 0 && width > 0, "an embedding of ", rows, " rows of ", width);
  weight_->is_table = true;
}

Var Embedding::operator()(Tape& tape, const tensor::Tensor& ids) {
  return run(tape, {}, [this, ids](Tape& t, const std::vector<Var>&) {
    return autograd::embedding(ids, t.parameter(weight_));
  });
}

Positions::Positions(std::int64_t max_positions, std::int64_t width, Init init)
    : weight_(declare("weight", {max_positions, width}, init)) {
  require(max_positions > 0 && width > 0, "a table of ", max_positions, " positions of ", width);
  weight_->is_table = true;
}

Var Positions::add_to(Tape& tape, const Var& x, const tensor::Positions& positions) {
  return run(tape, {x}, [this, positions](Tape& t, const std::vector<Var>& in) {
    return autograd::add_positions(in[0], t.parameter(weight_), positions);
  });
}

Var Positions::add_rows(Tape& tape, const Var& x, const tensor::Tensor& ids) {
  return run(tape, {x}, [this, ids](Tape& t, const std::vector<Var>& in) {
    return autograd::add(in[0], autograd::embedding(ids, t.parameter(weight_)));
  });
}

Var Positions::forward(Tape& tape, const Var& x) {
  return autograd::add_positions(x, tape.parameter(weight_));
}

}  // namespace sherd::nn

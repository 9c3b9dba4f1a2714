#include "nn/layers.h"

#include <cmath>
#include <utility>

#include "autograd/ops.h"

namespace sherd::nn {

Linear::Linear(std::int64_t in, std::int64_t out, LinearOptions options) : activation_(options.activation) {
  require(in > 0 && out > 0, "a linear layer from ", in, " to ", out, " features");
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  if (options.tied) {
    require(options.tied->shape == Shape{out, in}, "a weight of shape ", options.tied->shape.str(),
            " cannot serve a linear layer from ", in, " to ", out, " features");
    weight_ = share("weight", options.tied);
  } else {
    weight_ = declare("weight", {out, in}, options.init.value_or(Init::uniform(-bound, bound)));
    weight_->packing = options.packing;
    weight_->in_linear = options.fp8;
  }
  if (!options.bias) return;
  bias_ =
      declare("bias", {out}, options.init ? Init::zeros() : Init::uniform(-bound, bound), {.decay = false});
  bias_->packing = std::move(options.packing);
}

Var Linear::forward(Tape& tape, const Var& x) {
  return autograd::linear(x, tape.parameter(weight_), bias_ ? tape.parameter(bias_) : Var(), activation_);
}

LayerNorm::LayerNorm(std::int64_t width, double eps, bool bias)
    : eps_(eps), weight_(declare("weight", {width}, Init::ones(), {.decay = false})) {
  if (bias) bias_ = declare("bias", {width}, Init::zeros(), {.decay = false});
}

Var LayerNorm::forward(Tape& tape, const Var& x) {
  return autograd::layer_norm(x, tape.parameter(weight_), bias_ ? tape.parameter(bias_) : Var(), eps_);
}

RmsNorm::RmsNorm(std::int64_t width, double eps, double shift)
    : eps_(eps),
      shift_(shift),
      weight_(declare("weight", {width}, Init::constant(1 - shift), {.decay = false})) {}

Var RmsNorm::forward(Tape& tape, const Var& x) {
  return autograd::rms_norm(x, tape.parameter(weight_), eps_, shift_);
}

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

LearnedPositions::LearnedPositions(std::int64_t max_positions, std::int64_t width, Init init)
    : weight_(declare("weight", {max_positions, width}, init)) {
  require(max_positions > 0 && width > 0, "a table of ", max_positions, " positions of ", width);
  weight_->is_table = true;
}

Var LearnedPositions::add_to(Tape& tape, const Var& x, const tensor::Positions& positions) {
  return run(tape, {x}, [this, positions](Tape& t, const std::vector<Var>& in) {
    return autograd::add_positions(in[0], t.parameter(weight_), positions);
  });
}

Var LearnedPositions::add_rows(Tape& tape, const Var& x, const tensor::Tensor& ids) {
  return run(tape, {x}, [this, ids](Tape& t, const std::vector<Var>& in) {
    return autograd::add(in[0], autograd::embedding(ids, t.parameter(weight_)));
  });
}

Var LearnedPositions::forward(Tape& tape, const Var& x) {
  return autograd::add_positions(x, tape.parameter(weight_));
}

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

#include "autograd/ops.h"

#include "autograd/gradients.h"
#include "tensor/argument_checks.h"

namespace sherd::autograd {

Var cross_entropy(Var logits, const Tensor& targets, std::int64_t valid, std::int32_t ignore_index) {
  Tape& tape = logits.tape();
  const Shape shape = logits.shape();
  require(shape.rank() >= 1 && targets.numel() == shape.rows(), "cross_entropy: ", targets.numel(),
          " targets for logits of shape ", shape.str());
  require(targets.dtype() == DType::i32, "cross_entropy: targets must be int32, not ",
          name_of(targets.dtype()));
  require(valid >= 0 && valid <= shape.back(), "cross_entropy: ", valid, " valid columns of ", shape.back());
  Tensor scores = logits.value().reshape({shape.rows(), shape.back()});
  const Tensor flat = targets.reshape({targets.numel()});
  const DType compute = tensor::compute_type(scores.dtype());
  const tensor::VocabSlice all{0, valid};
  Tensor loss = tape.empty({1}, compute), lse = tape.empty({shape.rows()}, compute),
         picked = tape.empty({shape.rows()}, compute), total = tape.empty({2}, DType::f64);
  tensor::Kernels& kernels = tape.kernels();
  kernels.cross_entropy(scores, flat, all, ignore_index, lse, picked, {});
  kernels.cross_entropy_total(lse, picked, flat, ignore_index, lse, total, false);
  kernels.quotient(total.range(0, 1), total.range(1, 2), 1, loss);
  auto backward = [scores, flat, lse, total, dlogits = logits.grad_ref(), shape, all, ignore_index](
                      Tape& t, const Tensor& dy) mutable {
    Tensor own = std::move(scores);
    if (!own.storage().unique()) {  // somebody else still reads the logits
      Tensor copy = t.empty(own.shape(), own.dtype());
      t.kernels().copy(own, copy);
      own = std::move(copy);
    }
    const Tensor factor = t.empty({1}, DType::f64);
    t.kernels().quotient(dy, total.range(1, 2), 1, factor);
    t.kernels().cross_entropy_backward(own, flat, lse, all, ignore_index, factor);
    t.accumulate(dlogits, own.reshape(shape));
  };
  scores = {};
  return tape.record(std::move(loss), {logits}, std::move(backward));
}

Var binary_cross_entropy(const Var& logits, const Tensor& targets, const Tensor& weights) {
  Tape& tape = logits.tape();
  require(targets.shape() == logits.shape(), "binary_cross_entropy: logits ", logits.shape().str(),
          " and targets ", targets.shape().str(), " differ");
  require(!weights.defined() || weights.shape() == logits.shape(), "binary_cross_entropy: logits ",
          logits.shape().str(), " and weights ", weights.shape().str(), " differ");
  const DType own = logits.dtype(), wide = tensor::compute_type(own);
  if (own != targets.dtype() || (weights.defined() && own != weights.dtype()))
    return binary_cross_entropy(cast(logits, wide), tape.converted(targets, wide),
                                tape.converted(weights, wide));
  Tensor loss = tape.empty({1}, wide), total = tape.empty({2}, DType::f64);
  tape.kernels().binary_cross_entropy(logits.value(), targets, weights, total);
  tape.kernels().quotient(total.range(0, 1), total.range(1, 2), 1, loss);
  auto backward = [kept = Saved(logits), targets, weights, total, dx = logits.grad_ref()](Tape& t,
                                                                                          const Tensor& dy) {
    const Tensor input = kept.get(t), factor = t.empty({1}, DType::f64);
    t.kernels().quotient(dy, total.range(1, 2), 1, factor);
    Tensor grad = t.empty(input.shape(), input.dtype());
    t.kernels().binary_cross_entropy_backward(input, targets, weights, factor, grad);
    t.accumulate(dx, std::move(grad));
  };
  return tape.record(std::move(loss), {logits}, std::move(backward));
}

Var mean_squared_error(const Var& x, const Tensor& y) {
  Tape& tape = x.tape();
  require(x.shape() == y.shape(), "mean_squared_error: shapes ", x.shape().str(), " and ", y.shape().str(),
          " differ");
  if (const DType wide = tensor::compute_type(x.dtype()); x.dtype() != y.dtype()) {
    return mean_squared_error(cast(x, wide), tape.converted(y, wide));
  }
  Tensor loss = tape.empty({1}, tensor::compute_type(x.dtype()));
  tape.kernels().mean_squared_error(x.value(), y, loss);
  return tape.record(std::move(loss), {x},
                     [kept = Saved(x), y, dx = x.grad_ref()](Tape& t, const Tensor& dy) {
                       const Tensor input = kept.get(t);
                       Tensor grad = t.empty(input.shape(), input.dtype());
                       t.kernels().mean_squared_error_backward(input, y, dy, grad);
                       t.accumulate(dx, std::move(grad));
                     });
}

}  // namespace sherd::autograd

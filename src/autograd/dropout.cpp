#include "autograd/ops.h"

#include "autograd/gradients.h"

namespace sherd::autograd {
namespace {

/// The random numbers of one tensor's elements.
struct Mask {
  float p;
  RandomKey key;
  tensor::Slice elements;  ///< the place of x's elements in a logical tensor

  Mask(const Var& x, float probability, RandomKey stream, const tensor::Slice& slice)
      : p(probability), key(stream), elements(slice) {
    require(p >= 0.0f && p < 1.0f, "the dropout probability must be in [0, 1), not ", p);
    if (slice.logical().rank() == 0) elements = tensor::Slice::whole(x.shape());
    require(elements.numel() == x.shape().numel(), "dropout of ", x.shape().str(), " as elements ",
            elements.str());
  }

  /// Calls apply(part, random) for each run of elements that follow each other, where part(t) is that of t.
  template <class Apply>
  void for_each_run(const Apply& apply) const {
    const std::int64_t n = elements.numel();
    elements.for_each_run(0, n, [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
      const auto part = [&](const Tensor& t) { return t ? t.range(local, local + count) : t; };
      apply(part, tensor::RandomElements(key, static_cast<std::uint64_t>(logical)));
    });
  }

  /// out = residual + dropout(x); residual may be undefined.
  void forward(Tape& tape, const Tensor& x, const Tensor& residual, const Tensor& out) const {
    for_each_run([&](const auto& part, const tensor::RandomElements& random) {
      tape.kernels().dropout(part(x), part(residual), p, random, part(out));
    });
  }
  void backward(Tape& tape, const GradRef& dx, const Tensor& dy) const {
    Tensor grad = reuse_or_empty(tape, dy);
    for_each_run([&](const auto& part, const tensor::RandomElements& random) {
      tape.kernels().dropout_backward(part(dy), p, random, part(grad));
    });
    tape.accumulate(dx, std::move(grad));
  }
};

/// The factors of one tensor's elements, made again where they are needed.
struct Jitter {
  double spread;
  RandomKey key;
  tensor::Slice elements;

  Tensor times(Tape& tape, const Tensor& x, const Tensor& out) const {
    const Tensor factors = tape.empty(x.shape(), x.dtype());
    elements.for_each_run(0, elements.numel(),
                          [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
                            tape.kernels().fill_uniform(factors.range(local, local + count), key, logical,
                                                        1 - spread, 1 + spread);
                          });
    tape.kernels().multiply(x, factors, out);
    return out;
  }
};

}  // namespace

Var dropout(const Var& x, float p, RandomKey key, const tensor::Slice& elements) {
  Mask mask(x, p, key, elements);
  Tape& tape = x.tape();
  if (p == 0.0f || !tape.training) return x;
  Tensor out = tape.empty(x.shape(), x.dtype());
  mask.forward(tape, x.value(), Tensor(), out);
  return tape.record(
      std::move(out), {x},
      [dx = x.grad_ref(), mask = std::move(mask)](Tape& t, const Tensor& dy) { mask.backward(t, dx, dy); });
}

Var dropout_add(const Var& x, const Var& residual, float p, RandomKey key, const tensor::Slice& elements) {
  Mask mask(x, p, key, elements);
  Tape& tape = x.tape();
  if (p == 0.0f || !tape.training) return add(x, residual);
  require(x.shape() == residual.shape(), "dropout_add: shapes ", x.shape().str(), " and ",
          residual.shape().str(), " differ");
  Tensor out = tape.empty(x.shape(), x.dtype());
  mask.forward(tape, x.value(), residual.value(), out);
  auto backward = [dx = x.grad_ref(), dresidual = residual.grad_ref(), mask = std::move(mask)](
                      Tape& t, const Tensor& dy) {
    t.accumulate(dresidual, dy);
    if (dx) mask.backward(t, dx, dy);
  };
  return tape.record(std::move(out), {x, residual}, std::move(backward));
}

Var jitter(const Var& x, double spread, RandomKey key, const tensor::Slice& elements) {
  require(spread >= 0 && spread < 1, "the spread of jitter must be in [0, 1), not ", spread);
  const Jitter how{spread, key, elements.logical().rank() == 0 ? tensor::Slice::whole(x.shape()) : elements};
  require(how.elements.numel() == x.shape().numel(), "jitter of ", x.shape().str(), " as elements ",
          how.elements.str());
  Tape& tape = x.tape();
  if (spread == 0 || !tape.training) return x;
  return tape.record(how.times(tape, x.value(), tape.empty(x.shape(), x.dtype())), {x},
                     [dx = x.grad_ref(), how](Tape& t, const Tensor& dy) {
                       t.accumulate(dx, how.times(t, dy, reuse_or_empty(t, dy)));
                     });
}

}  // namespace sherd::autograd

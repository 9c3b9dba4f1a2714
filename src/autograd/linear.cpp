#include <numeric>

#include "autograd/experts.h"
#include "autograd/linear_products.h"

namespace sherd::autograd {
namespace {

/// The values that a linear layer's backward reads. Only what some wanted gradient needs is kept.
struct LinearBackward {
  LinearProducts products;
  LinearProducts::Input x;
  Saved w;
  Tensor pre;  // the sum before the activation
  Activation activation;
  GradRef dx, dw, db;
  Shape x_shape, w_shape;
  std::vector<std::int64_t> sources;  // of x's rows, for linear_by_source()

  void operator()(Tape& tape, Tensor dy) {
    dy = pre_activation_gradient(tape, activation, pre, std::move(dy));
    pre = {};
    if (sources.empty()) {
      bias_gradient(tape, db, dy);
      products.weight_gradient(tape, dw, w_shape, dy, x);
    } else {
      write_by_source(tape, db, Shape{dy.shape().back()}, dy.dtype(), sources, false,
                      [&](const SourceRows& rows, const Tensor& to, bool add, std::optional<DType>) {
                        tape.kernels().sum_rows(dy.rows(rows.begin, rows.end), to, add);
                      });
      products.weight_gradient_by_source(tape, dw, w_shape, dy, x, sources);
    }
    x = {};  // the input goes before its gradient comes
    if (dx) products.input_gradient(tape, dx, x_shape, std::move(dy), w.get(tape), sources);
  }
};

}  // namespace

void check_linear(const Shape& x, const Shape& w) {
  require(w.rank() == 2 && x.rank() >= 1 && x.back() == w[1], "linear: the weight ", w.str(),
          " does not take inputs of shape ", x.str());
}

RemakeFn remake_linear_output(const Tensor& pre, Activation activation) {
  if (activation == Activation::none) return nullptr;
  return [pre, activation](Tape& tape) {
    Tensor again = tape.empty(pre.shape(), pre.dtype());
    tape.kernels().activation(activation, pre, again);
    return again;
  };
}

Tensor pre_activation_gradient(Tape& tape, Activation activation, const Tensor& pre, Tensor dy) {
  if (activation == Activation::none) return dy;
  Tensor dpre = reuse_or_empty(tape, dy);
  tape.kernels().activation_backward(activation, pre, dy, dpre);
  return dpre;
}

void bias_gradient(Tape& tape, const GradRef& db, const Tensor& dy) {
  if (db)
    write_kernel_grad(tape, db, Shape{dy.shape().back()}, dy.dtype(),
                      [&](const Tensor& to, bool add) { tape.kernels().sum_rows(dy, to, add); });
}

namespace {

Var record_linear(const Var& x, const Var& w, const Var& b, Activation activation,
                  std::vector<std::int64_t> sources, bool adds_bias) {
  Tape& tape = x.tape();
  check_linear(x.shape(), w.shape());
  const bool recorded = tape.recording() && (x.requires_grad() || w.requires_grad() || b.requires_grad());
  if (sources.size() == 1) sources.clear();
  const LinearProducts products(w);
  LinearOutput made = products.output(tape, x.value(), w, b.defined() && adds_bias ? b.value() : Tensor(),
                                      activation, recorded, sources);
  if (!recorded) return tape.record(std::move(made.out), {x, w, b}, nullptr);
  RemakeFn remake = remake_linear_output(made.pre, activation);
  // With several sources the input is transposed source by source, in backward.
  const auto input = [&] { return sources.empty() ? products.save(x) : LinearProducts::Input(x); };
  LinearBackward backward{.products = products,
                          .x = w.requires_grad() ? input() : LinearProducts::Input(),
                          .w = x.requires_grad() ? Saved(w) : Saved(),
                          .pre = std::move(made.pre),
                          .activation = activation,
                          .dx = x.grad_ref(),
                          .dw = w.grad_ref(),
                          .db = b.grad_ref(),
                          .x_shape = x.shape(),
                          .w_shape = w.shape(),
                          .sources = std::move(sources)};
  return tape.record(std::move(made.out), {x, w, b}, std::move(backward), std::move(remake));
}

}  // namespace

Var linear(const Var& x, const Var& w, const Var& b, Activation activation) {
  return record_linear(x, w, b, activation, {}, true);
}

Var linear_by_source(const Var& x, const Var& w, const Var& b, Activation activation,
                     std::vector<std::int64_t> sources, bool adds_bias) {
  const std::int64_t rows = std::accumulate(sources.begin(), sources.end(), std::int64_t{0});
  require(x.shape().rank() == 2 && rows == x.shape()[0] && !sources.empty(), "linear_by_source: ", rows,
          " rows of ", sources.size(), " sources are not the input's, ", x.shape().str());
  return record_linear(x, w, b, activation, std::move(sources), adds_bias);
}

Var matmul(const Var& a, const Var& b, bool trans_a, bool trans_b) {
  Tape& tape = a.tape();
  require(a.shape().rank() == 2 && b.shape().rank() == 2 &&
              a.shape()[trans_a ? 0 : 1] == b.shape()[trans_b ? 1 : 0],
          "matmul: ", a.shape().str(), trans_a ? "ᵀ" : "", " times ", b.shape().str(), trans_b ? "ᵀ" : "");
  Tensor out = tape.empty({a.shape()[trans_a ? 1 : 0], b.shape()[trans_b ? 0 : 1]}, a.dtype());
  tape.kernels().matmul({.a = a.value(), .b = b.value(), .c = out, .trans_a = trans_a, .trans_b = trans_b});
  auto backward = [ka = Saved(a), kb = Saved(b), da = a.grad_ref(), db = b.grad_ref(), sa = a.shape(),
                   sb = b.shape(), trans_a, trans_b](Tape& t, const Tensor& dy) {
    // C = op(A)·op(B): dA = dC·op(B)ᵀ or its transpose, dB = op(A)ᵀ·dC or its transpose.
    if (da) {
      if (trans_a)
        write_product(t, da, sa, dy.dtype(), {.a = kb.get(t), .b = dy, .trans_a = trans_b, .trans_b = true});
      else
        write_product(t, da, sa, dy.dtype(), {.a = dy, .b = kb.get(t), .trans_b = !trans_b});
    }
    if (db) {
      if (trans_b)
        write_product(t, db, sb, dy.dtype(), {.a = dy, .b = ka.get(t), .trans_a = true, .trans_b = trans_a});
      else
        write_product(t, db, sb, dy.dtype(), {.a = ka.get(t), .b = dy, .trans_a = !trans_a});
    }
  };
  return tape.record(std::move(out), {a, b}, std::move(backward));
}

}  // namespace sherd::autograd

#include "autograd/ops.h"

#include "autograd/gradients.h"
#include "tensor/argument_checks.h"

namespace sherd::autograd {
namespace {

Tensor row_statistic(Tape& tape, const Tensor& x) {
  return tape.empty({x.shape().rows()}, tensor::compute_type(x.dtype()));
}

/// Where the gradient of a norm's input goes: onto what has been gathered of it, or into memory of its own.
struct InputGradient {
  Tensor to;
  bool onto;

  InputGradient(Tape& tape, const GradRef& dx, const Tensor& x) : to(tape.take_gathered(dx)), onto(to) {
    if (dx && !onto) to = tape.empty(x.shape(), x.dtype());
  }
};

struct LayerNormBackward {
  Saved x, weight;
  Tensor mean, rstd;
  GradRef dx, dweight, dbias;

  void operator()(Tape& tape, const Tensor& dy) const {
    const Tensor input = x.get(tape), scale = weight.get(tape);
    InputGradient grad(tape, dx, input);
    auto run = [&](const Tensor& to_x, const Tensor& to_weight, const Tensor& to_bias, bool add) {
      tape.kernels().layer_norm_backward(input, scale, mean, rstd, dy, to_x, to_weight, to_bias, add,
                                         grad.onto);
    };
    write_kernel_grad(tape, dweight, scale.shape(), scale.dtype(), [&](const Tensor& dw, bool add_weight) {
      if (!dbias) return run(grad.to, dw, Tensor(), add_weight);
      write_kernel_grad(tape, dbias, scale.shape(), scale.dtype(), [&](const Tensor& db, bool add_bias) {
        if (add_weight == add_bias) return run(grad.to, dw, db, add_weight);
        run(grad.to, dw, Tensor(), add_weight);
        run(Tensor(), Tensor(), db, add_bias);
      });
    });
    if (!dweight && dbias)
      write_kernel_grad(tape, dbias, scale.shape(), scale.dtype(),
                        [&](const Tensor& db, bool add) { run(grad.to, Tensor(), db, add); });
    if (!dweight && !dbias) run(grad.to, Tensor(), Tensor(), false);
    tape.accumulate(dx, std::move(grad.to));
  }
};

struct RmsNormBackward {
  Saved x, weight;
  Tensor rstd;
  GradRef dx, dweight;
  double shift;

  void operator()(Tape& tape, const Tensor& dy) const {
    const Tensor input = x.get(tape), scale = weight.get(tape);
    InputGradient grad(tape, dx, input);
    const auto run = [&](const Tensor& dw, bool add) {
      tape.kernels().rms_norm_backward(input, scale, rstd, dy, grad.to, dw, add, grad.onto, shift);
    };
    if (dweight)
      write_kernel_grad(tape, dweight, scale.shape(), scale.dtype(), run);
    else
      run(Tensor(), false);
    tape.accumulate(dx, std::move(grad.to));
  }
};

void check(const char* name, const Var& x, const Var& weight) {
  require(x.shape().rank() >= 1 && weight.shape() == Shape{x.shape().back()}, name, ": a weight of shape ",
          weight.shape().str(), " for values of shape ", x.shape().str());
}

}  // namespace

Var layer_norm(const Var& x, const Var& weight, const Var& bias, double eps) {
  check("layer_norm", x, weight);
  Tape& tape = x.tape();
  Tensor out = tape.empty(x.shape(), x.dtype());
  Tensor mean = row_statistic(tape, out), rstd = row_statistic(tape, out);
  tape.kernels().layer_norm(x.value(), weight.value(), bias.defined() ? bias.value() : Tensor(), eps, out,
                            mean, rstd);
  LayerNormBackward backward{x, weight, mean, rstd, x.grad_ref(), weight.grad_ref(), bias.grad_ref()};
  auto remake = [x = Saved(x), weight = Saved(weight), bias = bias.defined() ? Saved(bias) : Saved(),
                 has_bias = bias.defined(), eps](Tape& t) {
    const Tensor input = x.get(t);
    Tensor again = t.empty(input.shape(), input.dtype());
    t.kernels().layer_norm(input, weight.get(t), has_bias ? bias.get(t) : Tensor(), eps, again,
                           row_statistic(t, input), row_statistic(t, input));
    return again;
  };
  return tape.record(std::move(out), {x, weight, bias}, std::move(backward), std::move(remake));
}

Var rms_norm(const Var& x, const Var& weight, double eps, double shift) {
  check("rms_norm", x, weight);
  Tape& tape = x.tape();
  Tensor out = tape.empty(x.shape(), x.dtype());
  Tensor rstd = row_statistic(tape, out);
  tape.kernels().rms_norm(x.value(), weight.value(), eps, out, rstd, shift);
  RmsNormBackward backward{x, weight, rstd, x.grad_ref(), weight.grad_ref(), shift};
  auto remake = [x = Saved(x), weight = Saved(weight), eps, shift](Tape& t) {
    const Tensor input = x.get(t);
    Tensor again = t.empty(input.shape(), input.dtype());
    t.kernels().rms_norm(input, weight.get(t), eps, again, row_statistic(t, input), shift);
    return again;
  };
  return tape.record(std::move(out), {x, weight}, std::move(backward), std::move(remake));
}

}  // namespace sherd::autograd

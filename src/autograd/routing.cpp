#include <algorithm>
#include <cmath>

#include "autograd/experts.h"
#include "autograd/gradients.h"
#include "tensor/argument_checks.h"

namespace sherd::autograd {
namespace {

/// A choice as the processor knows it: the experts of each row, and how many rows each expert has.
void take_down(device::Device& device, const Tensor& chosen, const std::vector<bool>& filling, Routed& out) {
  const Tensor here = tensor::to_host(device, chosen);
  const std::int32_t* experts = here.data<std::int32_t>();
  out.chosen.assign(experts, experts + chosen.numel());
  for (std::size_t row = 0, k = static_cast<std::size_t>(chosen.shape()[1]); row < filling.size(); ++row)
    if (filling[row]) std::fill_n(out.chosen.begin() + static_cast<std::ptrdiff_t>(row * k), k, -1);
  for (const std::int32_t expert : out.chosen)
    if (expert >= 0) ++out.per_expert[static_cast<std::size_t>(expert)];
}

/// So many choices by tokens that take all experts in turn.
void take_in_turn(std::int64_t choices, std::vector<std::int64_t>& per_expert) {
  const std::int64_t experts = std::ssize(per_expert);
  for (std::int64_t e = 0; e < experts; ++e)
    per_expert[static_cast<std::size_t>(e)] = choices / experts + (e < choices % experts ? 1 : 0);
}

Tensor scaled_vector(Tape& tape, const std::vector<double>& values, double factor, DType dtype) {
  std::vector<double> wide;
  for (const double value : values) wide.push_back(value * factor);
  const tensor::Shape shape{std::ssize(wide)};
  if (dtype == DType::f64) return Tensor::of<double>(tape.device(), shape, wide);
  const std::vector<float> narrow(wide.begin(), wide.end());
  return Tensor::of<float>(tape.device(), shape, narrow);
}

struct RouteBackward {
  Saved logits;
  Tensor scores, chosen;
  tensor::Routing routing;
  std::function<RouterLossFactors()> losses;
  std::vector<bool> filling;
  GradRef dlogits;

  void operator()(Tape& tape, const Tensor& dweights) const {
    const Tensor z = logits.get(tape);
    tensor::RouterLossGradients added;
    if (losses) {
      const RouterLossFactors factors = losses();
      if (!factors.balance.empty())
        added.balance = scaled_vector(tape, factors.balance, tape.loss_seed, z.dtype());
      added.z = factors.z * tape.loss_seed;
    }
    Tensor out = tape.empty(z.shape(), z.dtype());
    tape.kernels().route_backward(z, routing, scores, chosen, dweights, added, out);
    for (std::size_t row = 0, end = 0; row < filling.size(); row = end) {
      for (end = row; end < filling.size() && filling[end] == filling[row];) ++end;
      if (filling[row])
        tape.kernels().fill(out.rows(static_cast<std::int64_t>(row), static_cast<std::int64_t>(end)), 0);
    }
    tape.accumulate(dlogits, std::move(out));
  }
};

}  // namespace

Var router_logits(const Var& x, const Var& w, const Var& b) {
  Tape& tape = x.tape();
  require(x.shape().rank() == 2 && x.dtype() == w.dtype(), "router_logits: inputs must be [tokens, in] of ",
          name_of(w.dtype()), ", not ", name_of(x.dtype()), " ", x.shape().str());
  const Shape shape = w.shape();
  require(shape.rank() == 2 && shape[1] == x.shape()[1], "router_logits: a weight ", shape.str(),
          " does not take inputs of shape ", x.shape().str());
  const DType compute = tensor::compute_type(x.dtype());
  Tensor out = tape.empty({x.shape()[0], shape[0]}, compute);
  tape.kernels().matmul({.a = x.value(),
                         .b = w.value(),
                         .c = out,
                         .trans_b = true,
                         .bias = b.defined() ? b.value() : Tensor()});
  auto backward = [kx = w.requires_grad() ? Saved(x) : Saved(), kw = x.requires_grad() ? Saved(w) : Saved(),
                   dx = x.grad_ref(), dw = w.grad_ref(), db = b.grad_ref(), shape,
                   dtype = x.dtype()](Tape& t, const Tensor& dy) {
    bias_gradient(t, db, dy);
    if (dw)
      write_kernel_grad(t, dw, shape, dy.dtype(), [&](const Tensor& to, bool add) {
        t.kernels().matmul(
            {.a = dy, .b = t.converted(kx.get(t), dy.dtype()), .c = to, .trans_a = true, .accumulate = add});
      });
    if (!dx) return;
    Tensor grad = t.empty({dy.shape()[0], shape[1]}, dy.dtype());
    t.kernels().matmul({.a = dy, .b = t.converted(kw.get(t), dy.dtype()), .c = grad});
    t.accumulate(dx, t.converted(grad, dtype));
  };
  return tape.record(std::move(out), {x, w, b}, std::move(backward));
}

Routed route(const Var& logits, const Tensor& bias, const tensor::Routing& routing,
             std::function<RouterLossFactors()> losses, std::vector<bool> filling) {
  Tape& tape = logits.tape();
  require(logits.shape().rank() == 2, "route: logits must be [tokens, experts], not ", logits.shape().str());
  const std::int64_t tokens = logits.shape()[0], experts = logits.shape()[1];
  require(filling.empty() || std::ssize(filling) == tokens, "route: ", filling.size(), " marks for ", tokens,
          " rows");
  Tensor scores = tape.empty(logits.shape(), logits.dtype());
  Tensor weights = tape.empty({tokens, routing.top_k}, logits.dtype());
  const Tensor chosen = Tensor::empty(tape.device(), {tokens, routing.top_k}, DType::i32);
  tape.kernels().route(logits.value(), bias, routing, scores, chosen, weights);
  Routed out;
  out.per_expert.resize(static_cast<std::size_t>(experts));
  if (tape.device().kind() == device::Kind::meta)
    take_in_turn((tokens - std::count(filling.begin(), filling.end(), true)) * routing.top_k, out.per_expert);
  else
    take_down(tape.device(), chosen, filling, out);
  out.weights = tape.record(std::move(weights), {logits},
                            RouteBackward{logits, std::move(scores), chosen, routing, std::move(losses),
                                          std::move(filling), logits.grad_ref()});
  return out;
}

RouterSums router_sums(Tape& tape, const Tensor& logits, const tensor::Routing& routing,
                       const std::vector<bool>& filling) {
  const std::int64_t tokens = logits.shape()[0], experts = logits.shape()[1];
  RouterSums out;
  out.probabilities.resize(static_cast<std::size_t>(experts));
  if (tape.device().kind() == device::Kind::meta || logits.numel() == 0) return out;
  const Tensor here = tape.on_host(logits, DType::f64);
  std::vector<double> p(out.probabilities.size());
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (!filling.empty() && filling[static_cast<std::size_t>(t)]) continue;
    const double* row = here.data<double>() + t * experts;
    const double top = *std::max_element(row, row + experts);
    double exponentials = 0, sum = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double e = std::exp(row[i] - top);
      p[i] = routing.scores == RouterScores::sigmoid ? 1 / (1 + std::exp(-row[i])) : e;
      exponentials += e, sum += p[i];
    }
    for (std::size_t i = 0; i < p.size(); ++i) out.probabilities[i] += p[i] / sum;
    const double lse = top + std::log(exponentials);
    out.z += lse * lse;
  }
  return out;
}

}  // namespace sherd::autograd

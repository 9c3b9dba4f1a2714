#include "autograd/gradients.h"
#include "autograd/key_cache.h"
#include "autograd/ops.h"
#include "tensor/argument_checks.h"

namespace sherd::autograd {

Var short_conv(const Var& x, const Var& weight) {
  Tape& tape = x.tape();
  tensor::StateStore store;
  if (tape.key_cache)
    store = tape.key_cache->states(tape, x.shape(), {weight.shape()[1] - 1, x.shape().back()}, x.dtype());
  const auto run = [documents = tape.documents, store](Tape& t, const Tensor& rows, const Tensor& taps) {
    Tensor out = t.empty(rows.shape(), rows.dtype());
    t.kernels().short_conv(rows, taps, documents, store, out);
    return out;
  };
  auto backward = [rows = Saved(x), taps = Saved(weight), dx = x.grad_ref(), dw = weight.grad_ref(),
                   documents = tape.documents](Tape& t, const Tensor& dy) {
    const Tensor input = rows.get(t), own = taps.get(t);
    const Tensor grad = dx ? t.empty(input.shape(), input.dtype()) : Tensor();
    if (dw)
      write_kernel_grad(t, dw, own.shape(), own.dtype(), [&](const Tensor& to, bool add) {
        t.kernels().short_conv_backward(input, own, documents, dy, grad, to, add);
      });
    else
      t.kernels().short_conv_backward(input, own, documents, dy, grad, {}, false);
    if (dx) t.accumulate(dx, grad);
  };
  return tape.record(
      run(tape, x.value(), weight.value()), {x, weight}, std::move(backward),
      [run, rows = Saved(x), taps = Saved(weight)](Tape& t) { return run(t, rows.get(t), taps.get(t)); });
}

Var delta_gates(const Var& x, const Var& a_log, const Var& dt_bias, int key_heads) {
  Tape& tape = x.tape();
  const DType compute = tensor::compute_type(x.dtype());
  Tensor out = tape.empty(x.shape(), compute);
  tape.kernels().delta_gates(x.value(), a_log.value(), dt_bias.value(), key_heads, out);
  return tape.record(
      std::move(out), {x, a_log, dt_bias},
      [rows = Saved(x), logs = Saved(a_log), biases = Saved(dt_bias), dx = x.grad_ref(),
       dlogs = a_log.grad_ref(), dbiases = dt_bias.grad_ref(), compute,
       key_heads](Tape& t, const Tensor& dy) {
        const Tensor input = rows.get(t), log = logs.get(t), bias = biases.get(t);
        Tensor grad = t.empty(input.shape(), input.dtype());
        const std::int64_t heads = log.numel(), count = input.numel() / (2 * heads);
        const Tensor parts = t.empty({2, count, heads}, compute);
        t.kernels().delta_gates_backward(input, log, bias, key_heads, dy, grad, parts);
        for (const auto& [ref, place] : {std::pair{&dlogs, 0}, {&dbiases, 1}})
          if (*ref)
            write_kernel_grad(t, *ref, log.shape(), log.dtype(), [&](const Tensor& to, bool add) {
              t.kernels().sum_axis(parts.rows(place, place + 1),
                                   {.outer = 1, .extent = count, .inner = heads}, 1, to, add);
            });
        if (dx) t.accumulate(dx, std::move(grad));
      });
}

Var delta_rule(const Var& qkv, const Var& gates, tensor::DeltaRule rule) {
  Tape& tape = qkv.tape();
  const Shape& shape = qkv.shape();
  require(rule.key_heads >= 1 && rule.value_heads >= 1 && rule.value_heads % rule.key_heads == 0 &&
              shape.rank() == 3,
          "delta_rule: rows ", shape.str(), " of ", rule.key_heads, " key heads and ", rule.value_heads,
          " value heads");
  rule.documents = tape.documents;
  const std::int64_t value_dim = rule.value_dim(shape[2]);
  const DType compute = tensor::compute_type(qkv.dtype());
  Tensor out = tape.empty(shape.with_back(rule.value_heads * value_dim), qkv.dtype());
  if (tape.key_cache) {
    const tensor::StateStore store =
        tape.key_cache->states(tape, shape, {rule.value_heads, rule.key_dim, value_dim}, compute);
    tape.kernels().delta_rule(qkv.value(), gates.value(), rule, store, {}, out);
    return tape.record(std::move(out), {qkv, gates}, nullptr);
  }
  const auto states_for = [=](Tape& t) {
    const std::int64_t blocks = (shape[1] + tensor::Kernels::delta_block - 1) / tensor::Kernels::delta_block;
    return t.empty({shape[0], rule.value_heads, blocks, rule.key_dim, value_dim}, compute);
  };
  // States are dropped with the result, and made again with it.
  auto states = std::make_shared<Tensor>();
  const bool keeps = tape.recording() && tape.recompute != Recompute::selective;
  if (keeps) *states = states_for(tape);
  tape.kernels().delta_rule(qkv.value(), gates.value(), rule, {}, *states, out);
  return tape.record(
      std::move(out), {qkv, gates},
      [rows = Saved(qkv), by = Saved(gates), dx = qkv.grad_ref(), dgates = gates.grad_ref(), rule, states,
       states_for](Tape& t, const Tensor& dy) {
        const Tensor input = rows.get(t), given = by.get(t);
        if (!*states) {
          *states = states_for(t);
          const Tensor again = t.empty(dy.shape(), dy.dtype());
          t.kernels().delta_rule(input, given, rule, {}, *states, again);
        }
        Tensor grad = t.empty(input.shape(), input.dtype()), of_gates = t.empty(given.shape(), given.dtype());
        t.kernels().delta_rule_backward(input, given, rule, *states, dy, grad, of_gates);
        *states = {};
        if (dx) t.accumulate(dx, std::move(grad));
        if (dgates) t.accumulate(dgates, std::move(of_gates));
      },
      [rows = Saved(qkv), by = Saved(gates), rule, states, states_for](Tape& t) {
        const Tensor input = rows.get(t);
        Tensor again = t.empty(input.shape().with_back(rule.value_heads * rule.value_dim(input.shape()[2])),
                               input.dtype());
        if (!*states) *states = states_for(t);
        t.kernels().delta_rule(input, by.get(t), rule, {}, *states, again);
        return again;
      });
}

}  // namespace sherd::autograd

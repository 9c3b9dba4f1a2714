#include "sharding/parallel/vocab_head.h"

#include "autograd/ops.h"

namespace sherd::parallel {

HeadCall checked_head(const Var& x, const VocabHead& of, const Tensor& labels, const Layout& layout) {
  const auto& [weight, bias, vocabulary, cap, trained] = of;
  const Shape &stream = x.shape(), &table = weight.shape();
  require(stream.rank() == 3 && table.rank() == 2 && table[1] == stream[2] && x.dtype() == weight.dtype(),
          "vocab_cross_entropy: a table of ", name_of(weight.dtype()), " ", table.str(), " does not take ",
          name_of(x.dtype()), " ", stream.str());
  const Shape inner{stream[0], stream[1] * (layout.cuts_stream() ? layout.tensor_size() : 1), stream[2]};
  require(labels.defined() && labels.dtype() == DType::i32 && labels.shape() == Shape({inner[0], inner[1]}),
          "vocab_cross_entropy: labels must be int32 [", inner[0], ", ", inner[1], "], not ",
          labels.defined() ? cat(name_of(labels.dtype()), " ", labels.shape().str()) : "undefined");
  require(!bias.defined() || (bias.shape() == Shape({table[0]}) && bias.dtype() == weight.dtype()),
          "vocab_cross_entropy: the bias must be ", name_of(weight.dtype()), " [", table[0], "]");
  require(vocabulary > 0 && vocabulary <= table[0] * layout.tensor_size(), "vocab_cross_entropy: a table of ",
          table[0], " rows on each of ", layout.tensor_size(), " tensor-parallel ranks does not hold ",
          vocabulary, " ids");
  return {layout,
          labels.reshape({labels.numel()}),
          {layout.tensor_rank() * table[0], vocabulary},
          stream,
          inner,
          table,
          cap,
          x.dtype(),
          x.tape().device().has_own_memory()};
}

Exchange begin_inner(tensor::Kernels& kernels, const HeadCall& head, const Tensor& x, bool async) {
  if (!head.layout.cuts_stream()) return {{}, {}, x};
  return begin_all_gather(kernels, *head.layout.tensor, x, 1,
                          {.label = "the loss: tokens of the sequence", .async = async});
}

Tensor inner_rows(tensor::Kernels& kernels, const HeadCall& head, const Tensor& x) {
  return begin_inner(kernels, head, x, false).wait().reshape({head.rows(), head.w_shape[1]});
}

Exchange begin_stream_gradient(tensor::Kernels& kernels, const HeadCall& head, const Tensor& dx) {
  Communicator* group = head.layout.tensor;
  const Tensor inner = dx.reshape(head.inner_shape);
  if (alone(group)) return {{}, {}, inner};
  const comm::CallOptions options{.label = "the loss: gradient of the tokens", .async = true};
  if (head.layout.cuts_stream()) return begin_reduce_scatter(kernels, *group, inner, 1, options);
  return begin_all_reduce(*group, inner, options);
}

Tensor make_logits(Tape& tape, const HeadCall& head, const Tensor& x, const VocabHead& of) {
  Tensor logits = tape.empty({x.shape()[0], head.w_shape[0]}, head.dtype);
  tape.kernels().matmul({.a = x,
                         .b = of.weight.value(),
                         .c = logits,
                         .trans_b = true,
                         .bias = of.bias.defined() ? of.bias.value() : Tensor()});
  put_columns(tape, x, of.trained, of.bias.defined() ? of.bias.value() : Tensor(), logits);
  if (head.cap > 0) {
    tape.kernels().scale(logits, 1 / head.cap, logits);
    tape.kernels().tanh(logits, logits);
    tape.kernels().scale(logits, head.cap, logits);
  }
  return logits;
}

Tensor gradient_factor(Tape& tape, const Tensor& dy, const Tensor& divisor, double factor) {
  Tensor out = tape.empty({1}, DType::f64);
  tape.kernels().quotient(dy, divisor, factor, out);
  return out;
}

void differentiate(Tape& tape, const HeadCall& head, const Tensor& logits, const Tensor& labels,
                   const Tensor& lse, const RowFactors& factors, const Tensor& dy, std::int64_t first) {
  Tensor tanh;
  if (head.cap > 0) tape.kernels().scale(logits, 1 / head.cap, tanh = tape.empty(logits.shape(), head.dtype));
  for (const RowFactor& run : factors.runs) {
    const std::int64_t begin = std::max<std::int64_t>(0, run.begin - first),
                       end = std::min(logits.shape()[0], run.end - first);
    if (begin >= end) continue;
    tape.kernels().cross_entropy_backward(logits.rows(begin, end), labels.range(begin, end),
                                          lse.range(begin, end), head.slice, no_label,
                                          gradient_factor(tape, dy, factors.divisor, run.factor));
  }
  if (tanh) tape.kernels().tanh_backward(tanh, logits, logits);
}

void TrainedBackward::add_to(tensor::Kernels& kernels, const Tensor& all, const std::vector<Tensor>& columns,
                             const Tensor& dx) const {
  for (std::size_t i = 0; i < columns.size(); ++i)
    kernels.matmul({.a = columns[i],
                    .b = all.rows(runs[i].from, runs[i].from + runs[i].count),
                    .c = dx,
                    .accumulate = true});
}

void TrainedBackward::write(tensor::Kernels& kernels, const std::vector<Tensor>& columns, const Tensor& x,
                            const Tensor& to, bool add) const {
  if (!add) kernels.fill(to, 0);
  for (std::size_t i = 0; i < columns.size(); ++i)
    kernels.matmul({.a = columns[i],
                    .b = x,
                    .c = to.rows(runs[i].from, runs[i].from + runs[i].count),
                    .trans_a = true,
                    .accumulate = true});
}

HeadGradients::HeadGradients(const Var& of_x, const VocabHead& of) {
  const Var& rows = of.trained.rows;
  recorded = of_x.tape().recording() && (of_x.requires_grad() || of.weight.requires_grad() ||
                                         of.bias.requires_grad() || rows.requires_grad());
  const auto wanted = [this](const Var& v) { return recorded ? v.grad_ref() : nullptr; };
  x = wanted(of_x), weight = wanted(of.weight), bias = wanted(of.bias);
  if (rows.defined()) trained = {wanted(rows), x ? Saved(rows) : Saved(), rows.shape(), of.trained.runs};
  require(!rows.defined() || !weight, "rows of a head are trained apart, or all of it is");
}

WholeBackward::WholeBackward(HeadCall of, const Var& of_x, const VocabHead& values, HeadGradients gradients,
                             Tensor kept, Tensor log_sums, RowFactors of_rows)
    : head(std::move(of)),
      x(gradients.weight || gradients.trained.rows ? Saved(of_x) : Saved()),
      weight(gradients.x ? Saved(values.weight) : Saved()),
      dx(gradients.x),
      dw(gradients.weight),
      db(gradients.bias),
      logits(std::move(kept)),
      lse(std::move(log_sums)),
      factors(std::move(of_rows)),
      trained(std::move(gradients.trained)) {}

void WholeBackward::operator()(Tape& tape, const Tensor& dy) {
  tensor::Kernels& kernels = tape.kernels();
  Exchange inner = dw || trained.rows ? begin_inner(kernels, head, x.get(tape), true) : Exchange();
  x = {};
  differentiate(tape, head, logits, head.labels, lse, factors, dy);
  autograd::bias_gradient(tape, db, logits);
  const std::vector<Tensor> columns = take_columns(tape, trained.runs, logits);
  Exchange sum = dx ? begin_stream_gradient(kernels, head, product(tape, columns)) : Exchange();
  if (trained.rows)
    autograd::write_kernel_grad(
        tape, trained.rows, trained.shape, head.dtype,
        [&, rows = inner.wait().reshape({head.rows(), head.w_shape[1]})](const Tensor& to, bool add) {
          trained.write(kernels, columns, rows, to, add);
        });
  if (dw)
    tape.weight_gradient(dw, [ref = dw, shape = head.w_shape, dlogits = std::move(logits),
                              rows = inner.wait().reshape({head.rows(), head.w_shape[1]})](Tape& t) {
      autograd::write_folded_grad(
          t, ref, shape, dlogits.dtype(), [&](const Tensor& to, bool add, std::optional<DType> fold) {
            t.kernels().matmul(
                {.a = dlogits, .b = rows, .c = to, .trans_a = true, .accumulate = add, .fold = fold});
          });
    });
  if (dx) tape.accumulate(dx, sum.wait());
}

Tensor WholeBackward::product(Tape& tape, const std::vector<Tensor>& columns) const {
  Tensor out = tape.empty({head.rows(), head.w_shape[1]}, head.dtype);
  tape.kernels().matmul({.a = logits, .b = weight.get(tape), .c = out});
  if (!columns.empty()) trained.add_to(tape.kernels(), trained.values.get(tape), columns, out);
  return out;
}

}  // namespace sherd::parallel

#include "sharding/parallel/loss.h"

#include <algorithm>

#include "autograd/ops.h"
#include "sharding/parallel/vocab_head.h"

namespace sherd::parallel {
namespace {

/// Adds what these tokens' logits give to `total` and returns their log-sum-exp over the whole vocabulary.
Tensor add_loss(Tape& tape, const HeadCall& head, const Tensor& logits, const Tensor& labels,
                const Tensor& total) {
  const int parts = head.layout.tensor_size(), mine = head.layout.tensor_rank();
  const Shape shape{parts, labels.numel()};
  const Tensor lse = tape.empty(shape, head.compute()), picked = tape.empty(shape, head.compute());
  const Tensor own_lse = lse.rows(mine, mine + 1), own_picked = picked.rows(mine, mine + 1);
  tape.kernels().cross_entropy(logits, labels, head.slice, no_label, own_lse, own_picked, {});
  if (!alone(head.layout.tensor))
    head.layout.tensor
        ->all_gather({{own_lse, lse}, {own_picked, picked}}, {.label = "the loss: parts of the vocabulary"})
        .wait();
  const Tensor all = lse.range(0, labels.numel());
  tape.kernels().cross_entropy_total(lse, picked, labels, no_label, all, total, true);
  return all;
}

/// The gradients of a loss that was taken in chunks, times chunk_factor.
struct ChunkGradients {
  HeadCall head;
  GradRef dx_ref, dw_ref, db_ref;
  Tensor dx, dw, db;  ///< [rows, hidden] in x's dtype; of the weight and the bias, in the compute type
  Tensor total;
  TrainedBackward trained;
  Tensor drows;  ///< as dw

  /// Backward.
  void operator()(Tape& tape, const Tensor& dy) {
    tensor::Kernels& kernels = tape.kernels();
    const Tensor factor = gradient_factor(tape, dy, total.range(1, 2), 1 / chunk_factor);
    if (dx) kernels.add_scaled(dx, factor, dx, false);
    Exchange sum = dx ? begin_stream_gradient(kernels, head, dx) : Exchange();
    dx = {};
    tape.write_grad(dw_ref, head.w_shape, head.dtype,
                    [&](const Tensor& to, bool add) { kernels.add_scaled(dw, factor, to, add); });
    dw = {};
    tape.write_grad(db_ref, Shape{head.w_shape[0]}, head.dtype,
                    [&](const Tensor& to, bool add) { kernels.add_scaled(db, factor, to, add); });
    db = {};
    tape.write_grad(trained.rows, trained.shape, head.dtype,
                    [&](const Tensor& to, bool add) { kernels.add_scaled(drows, factor, to, add); });
    drows = {};
    if (dx_ref) tape.accumulate(dx_ref, sum.wait());
  }
};

/// Takes the loss in chunks of tokens, with the gradients that `want` asks for.
void take_chunks(Tape& tape, const Tensor& x, const VocabHead& of, ChunkGradients& want) {
  const HeadCall& head = want.head;
  const Tensor one = tape.empty({1}, DType::f64);
  tape.kernels().fill(one, 1);
  if (want.dx_ref) want.dx = tape.empty(x.shape(), head.dtype);
  if (want.dw_ref) want.dw = tape.empty(head.w_shape, head.compute());
  if (want.db_ref) want.db = tape.empty({head.w_shape[0]}, head.compute());
  if (want.trained.rows) {
    want.drows = tape.empty(want.trained.shape, head.compute());
    tape.kernels().fill(want.drows, 0);
  }
  const std::int64_t step = head.chunk_rows();
  for (std::int64_t begin = 0; begin < head.rows(); begin += step) {
    const std::int64_t end = std::min(head.rows(), begin + step);
    const Tensor rows = x.rows(begin, end), labels = head.labels.range(begin, end);
    const Tensor logits = make_logits(tape, head, rows, of);
    const Tensor lse = add_loss(tape, head, logits, labels, want.total);
    if (!want.dx && !want.dw && !want.db && !want.drows) continue;
    differentiate(tape, head, logits, labels, lse, {{{0, end - begin, chunk_factor}}, one}, one);
    if (want.db) tape.kernels().sum_rows(logits, want.db, begin > 0);
    const std::vector<Tensor> columns = take_columns(tape, of.trained.runs, logits);
    if (want.dx) {
      tape.kernels().matmul({.a = logits, .b = of.weight.value(), .c = want.dx.rows(begin, end)});
      if (!columns.empty())
        want.trained.add_to(tape.kernels(), of.trained.rows.value(), columns, want.dx.rows(begin, end));
    }
    if (want.drows) want.trained.write(tape.kernels(), columns, rows, want.drows, true);
    if (want.dw)
      tape.kernels().matmul({.a = logits, .b = rows, .c = want.dw, .trans_a = true, .accumulate = begin > 0});
  }
}

}  // namespace

Var capped(const Var& scores, double cap) {
  if (cap == 0) return scores;
  return autograd::scale(autograd::tanh(autograd::scale(scores, 1 / cap)), cap);
}

Var vocab_cross_entropy(const Var& x, const VocabHead& of, const Tensor& labels, const Layout& layout) {
  Tape& tape = x.tape();
  const HeadCall head = checked_head(x, of, labels, layout);
  HeadGradients want(x, of);
  const Tensor total = tape.empty({2}, DType::f64);
  tape.kernels().fill(total, 0);
  const Tensor rows = inner_rows(tape.kernels(), head, x.value());
  autograd::BackwardFn backward;
  const bool recorded = want.recorded;
  if (recorded && head.keeps_logits()) {
    const Tensor logits = make_logits(tape, head, rows, of);
    const Tensor lse = add_loss(tape, head, logits, head.labels, total);
    backward =
        WholeBackward(head, x, of, std::move(want), logits, lse, {{{0, head.rows(), 1}}, total.range(1, 2)});
  } else {
    ChunkGradients gradients{head, want.x, want.weight, want.bias, {}, {}, {}, total, std::move(want.trained),
                             {}};
    take_chunks(tape, rows, of, gradients);
    if (recorded) backward = std::move(gradients);
  }
  if (!alone(layout.context))
    layout.context->all_reduce(total, comm::ReduceOp::sum, 1, {.label = "the loss", .scalar = true}).wait();
  Tensor loss = tape.empty({1}, head.compute());
  tape.kernels().quotient(total.range(0, 1), total.range(1, 2), 1, loss);
  return tape.record(std::move(loss), {x, of.weight, of.bias, of.trained.rows}, std::move(backward));
}

Tensor vocab_scores(const Var& x, const VocabHead& of, const Tensor& labels, const Layout& layout) {
  Tape& tape = x.tape();
  const HeadCall head = checked_head(x, of, labels, layout);
  const std::int64_t parts = layout.tensor_size(), n = head.rows();
  const Tensor out = tape.empty({3, parts, n}, head.compute());
  std::vector<Tensor> own;
  for (std::int64_t kind = 0; kind < 3; ++kind) {
    const std::int64_t first = (kind * parts + layout.tensor_rank()) * n;
    own.push_back(out.range(first, first + n));
  }
  const Tensor rows = inner_rows(tape.kernels(), head, x.value());
  const std::int64_t step = head.keeps_logits() ? n : head.chunk_rows();
  for (std::int64_t begin = 0; begin < n; begin += step) {
    const std::int64_t end = std::min(n, begin + step);
    tape.kernels().cross_entropy(
        make_logits(tape, head, rows.rows(begin, end), of), head.labels.range(begin, end), head.slice,
        no_label, own[0].range(begin, end), own[1].range(begin, end), own[2].range(begin, end));
  }
  if (alone(layout.tensor)) return out;
  std::vector<comm::GatherPiece> pieces;
  for (std::int64_t kind = 0; kind < 3; ++kind)
    pieces.push_back(
        {own[static_cast<std::size_t>(kind)], out.range(kind * parts * n, (kind + 1) * parts * n)});
  layout.tensor->all_gather(std::move(pieces), {.label = "scores: parts of the vocabulary"}).wait();
  return out;
}

}  // namespace sherd::parallel

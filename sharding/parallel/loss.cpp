#include "sharding/parallel/loss.h"

#include <algorithm>

#include "autograd/gradients.h"
#include "autograd/ops.h"
#include "sharding/parallel/exchanges.h"
#include "tensor/argument_checks.h"

namespace sherd::parallel {
namespace {

using autograd::GradRef;
using autograd::Saved;
using autograd::Tape;
using autograd::Var;
using tensor::Shape;

/// A factor by which gradients of chunks are multiplied, whose divisor is known only when all ranks have
/// counted their labels: fp16 keeps small probabilities so, and a power of two rounds nothing.
constexpr double chunk_factor = 256;

/// A call's arguments but for the tensors that are computed.
struct Head {
  Layout layout;
  Tensor labels;  ///< [rows]
  tensor::VocabSlice slice;
  std::int32_t ignore_index;
  Shape x_shape, inner_shape, w_shape;
  double cap;
  DType dtype;
  bool on_gpu;

  std::int64_t rows() const { return labels.numel(); }
  DType compute() const { return tensor::compute_type(dtype); }
  /// Tokens whose logits take as much memory as the weight's gradient in the compute type.
  std::int64_t most_rows() const {
    return static_cast<std::int64_t>(size_of(compute()) / size_of(dtype)) * w_shape[1];
  }
  /// Logits take no more memory than chunks would, which hold that gradient and the logits of one.
  bool keeps_logits() const { return rows() <= 2 * most_rows(); }
  /// Tokens of a chunk: equal parts of what is there, but for the last. Each chunk reads and writes the
  /// gradient of the weight, so a GPU takes half a gigabyte of logits at once where that is more; whatever
  /// part of the vocabulary a rank has, chunks are the same.
  std::int64_t chunk_rows() const {
    constexpr std::int64_t step = 64;  // what products like
    constexpr std::int64_t gpu_logits = std::int64_t{512} << 20;
    const std::int64_t whole_row = slice.ids * static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t limit = std::max(most_rows(), on_gpu ? gpu_logits / whole_row : 0);
    const std::int64_t most = std::max(step, limit / step * step);
    const std::int64_t chunks = std::max<std::int64_t>(1, (rows() + most - 1) / most);
    return std::max(step, (rows() + chunks * step - 1) / (chunks * step) * step);
  }
};

Head checked(const Var& x, const VocabHead& of, const Tensor& labels, const Layout& layout,
             std::int32_t ignore_index) {
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
          ignore_index,
          stream,
          inner,
          table,
          cap,
          x.dtype(),
          x.tape().device().has_own_memory()};
}

/// All tokens of this context rank, from its part of the stream.
Exchange begin_inner(tensor::Kernels& kernels, const Head& head, const Tensor& x, bool async) {
  if (!head.layout.cuts_stream()) return {{}, {}, x};
  return begin_all_gather(kernels, *head.layout.tensor, x, 1,
                          {.label = "the loss: tokens of the sequence", .async = async});
}

/// The sum over tensor ranks of what each finds as the gradient of all tokens, as that of its part of the
/// stream. It runs beside what comes next.
Exchange begin_stream_gradient(tensor::Kernels& kernels, const Head& head, const Tensor& dx) {
  Communicator* group = head.layout.tensor;
  const Tensor inner = dx.reshape(head.inner_shape);
  if (alone(group)) return {{}, {}, inner};
  const comm::CallOptions options{.label = "the loss: gradient of the tokens", .async = true};
  if (head.layout.cuts_stream()) return begin_reduce_scatter(kernels, *group, inner, 1, options);
  return begin_all_reduce(*group, inner, options);
}

/// Adds what these tokens' logits give to `total` and returns their log-sum-exp over the whole vocabulary.
Tensor add_loss(Tape& tape, const Head& head, const Tensor& logits, const Tensor& labels,
                const Tensor& total) {
  const int parts = head.layout.tensor_size(), mine = head.layout.tensor_rank();
  const Shape shape{parts, labels.numel()};
  const Tensor lse = tape.empty(shape, head.compute()), picked = tape.empty(shape, head.compute());
  const Tensor own_lse = lse.rows(mine, mine + 1), own_picked = picked.rows(mine, mine + 1);
  tape.kernels().cross_entropy(logits, labels, head.slice, head.ignore_index, own_lse, own_picked, {});
  if (!alone(head.layout.tensor))
    head.layout.tensor
        ->all_gather({{own_lse, lse}, {own_picked, picked}}, {.label = "the loss: parts of the vocabulary"})
        .wait();
  const Tensor all = lse.range(0, labels.numel());
  tape.kernels().cross_entropy_total(lse, picked, labels, head.ignore_index, all, total, true);
  return all;
}

Tensor make_logits(Tape& tape, const Head& head, const Tensor& x, const VocabHead& of) {
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

/// Turns `logits` into factor·(softmax - onehot), the gradient before any cap.
void differentiate(Tape& tape, const Head& head, const Tensor& logits, const Tensor& labels,
                   const Tensor& lse, const Tensor& factor) {
  Tensor tanh;
  if (head.cap > 0) tape.kernels().scale(logits, 1 / head.cap, tanh = tape.empty(logits.shape(), head.dtype));
  tape.kernels().cross_entropy_backward(logits, labels, lse, head.slice, head.ignore_index, factor);
  if (tanh) tape.kernels().tanh_backward(tanh, logits, logits);
}

/// factor·dy over the number of labels that count.
Tensor gradient_factor(Tape& tape, const Tensor& dy, const Tensor& total, double factor) {
  Tensor out = tape.empty({1}, DType::f64);
  tape.kernels().quotient(dy, total.range(1, 2), factor, out);
  return out;
}

/// What backward needs of rows that are trained apart.
struct TrainedBackward {
  GradRef rows;
  Saved values;  ///< where x's gradient is wanted
  Shape shape;
  std::vector<autograd::SpreadRows> runs;

  /// Adds what their columns' gradients give to that of x.
  void add_to(tensor::Kernels& kernels, const Tensor& all, const std::vector<Tensor>& columns,
              const Tensor& dx) const {
    for (std::size_t i = 0; i < columns.size(); ++i)
      kernels.matmul({.a = columns[i],
                      .b = all.rows(runs[i].from, runs[i].from + runs[i].count),
                      .c = dx,
                      .accumulate = true});
  }
  /// Their own gradient, by all tokens x.
  void write(tensor::Kernels& kernels, const std::vector<Tensor>& columns, const Tensor& x, const Tensor& to,
             bool add) const {
    if (!add) kernels.fill(to, 0);
    for (std::size_t i = 0; i < columns.size(); ++i)
      kernels.matmul({.a = columns[i],
                      .b = x,
                      .c = to.rows(runs[i].from, runs[i].from + runs[i].count),
                      .trans_a = true,
                      .accumulate = true});
  }
};

/// Backward of a loss whose logits were kept.
struct WholeBackward {
  Head head;
  Saved x, weight;
  GradRef dx, dw, db;
  Tensor logits, lse, total;
  TrainedBackward trained;

  void operator()(Tape& tape, const Tensor& dy) {
    tensor::Kernels& kernels = tape.kernels();
    Exchange inner = dw || trained.rows ? begin_inner(kernels, head, x.get(tape), true) : Exchange();
    x = {};
    differentiate(tape, head, logits, head.labels, lse, gradient_factor(tape, dy, total, 1));
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

  Tensor product(Tape& tape, const std::vector<Tensor>& columns) const {
    Tensor out = tape.empty({head.rows(), head.w_shape[1]}, head.dtype);
    tape.kernels().matmul({.a = logits, .b = weight.get(tape), .c = out});
    if (!columns.empty()) trained.add_to(tape.kernels(), trained.values.get(tape), columns, out);
    return out;
  }
};

/// The gradients of a loss that was taken in chunks, times chunk_factor.
struct ChunkGradients {
  Head head;
  GradRef dx_ref, dw_ref, db_ref;
  Tensor dx, dw, db;  ///< [rows, hidden] in x's dtype; of the weight and the bias, in the compute type
  Tensor total;
  TrainedBackward trained;
  Tensor drows;  ///< as dw

  /// Backward.
  void operator()(Tape& tape, const Tensor& dy) {
    tensor::Kernels& kernels = tape.kernels();
    const Tensor factor = gradient_factor(tape, dy, total, 1 / chunk_factor);
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
  const Head& head = want.head;
  const Tensor factor = tape.empty({1}, DType::f32);
  tape.kernels().fill(factor, chunk_factor);
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
    differentiate(tape, head, logits, labels, lse, factor);
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

Var vocab_cross_entropy(const Var& x, const VocabHead& of, const Tensor& labels, const Layout& layout,
                        std::int32_t ignore_index) {
  Tape& tape = x.tape();
  const Head head = checked(x, of, labels, layout, ignore_index);
  const Var& trained_rows = of.trained.rows;
  const bool recorded = tape.recording() && (x.requires_grad() || of.weight.requires_grad() ||
                                             of.bias.requires_grad() || trained_rows.requires_grad());
  const auto wanted = [recorded](const Var& v) { return recorded ? v.grad_ref() : nullptr; };
  const GradRef dx = wanted(x), dw = wanted(of.weight), db = wanted(of.bias);
  TrainedBackward trained;
  if (trained_rows.defined())
    trained = {wanted(trained_rows), dx ? Saved(trained_rows) : Saved(), trained_rows.shape(),
               of.trained.runs};
  require(!trained_rows.defined() || !dw, "rows of a head are trained apart, or all of it is");
  const Tensor total = tape.empty({2}, DType::f64);
  tape.kernels().fill(total, 0);
  Tensor rows = begin_inner(tape.kernels(), head, x.value(), false).wait();
  rows = rows.reshape({head.rows(), head.w_shape[1]});
  autograd::BackwardFn backward;
  if (recorded && head.keeps_logits()) {
    const Tensor logits = make_logits(tape, head, rows, of);
    const Tensor lse = add_loss(tape, head, logits, head.labels, total);
    backward = WholeBackward{head,
                             dw || trained.rows ? Saved(x) : Saved(),
                             dx ? Saved(of.weight) : Saved(),
                             dx,
                             dw,
                             db,
                             logits,
                             lse,
                             total,
                             std::move(trained)};
  } else {
    ChunkGradients gradients{head, dx, dw, db, {}, {}, {}, total, std::move(trained), {}};
    take_chunks(tape, rows, of, gradients);
    if (recorded) backward = std::move(gradients);
  }
  if (!alone(layout.context))
    layout.context->all_reduce(total, comm::ReduceOp::sum, 1, {.label = "the loss", .scalar = true}).wait();
  Tensor loss = tape.empty({1}, head.compute());
  tape.kernels().quotient(total.range(0, 1), total.range(1, 2), 1, loss);
  return tape.record(std::move(loss), {x, of.weight, of.bias, trained_rows}, std::move(backward));
}

Tensor vocab_scores(const Var& x, const VocabHead& of, const Tensor& labels, const Layout& layout,
                    std::int32_t ignore_index) {
  Tape& tape = x.tape();
  const Head head = checked(x, of, labels, layout, ignore_index);
  const std::int64_t parts = layout.tensor_size(), n = head.rows();
  const Tensor out = tape.empty({3, parts, n}, head.compute());
  std::vector<Tensor> own;
  for (std::int64_t kind = 0; kind < 3; ++kind) {
    const std::int64_t first = (kind * parts + layout.tensor_rank()) * n;
    own.push_back(out.range(first, first + n));
  }
  const Tensor rows =
      begin_inner(tape.kernels(), head, x.value(), false).wait().reshape({n, head.w_shape[1]});
  const std::int64_t step = head.keeps_logits() ? n : head.chunk_rows();
  for (std::int64_t begin = 0; begin < n; begin += step) {
    const std::int64_t end = std::min(n, begin + step);
    tape.kernels().cross_entropy(
        make_logits(tape, head, rows.rows(begin, end), of), head.labels.range(begin, end), head.slice,
        ignore_index, own[0].range(begin, end), own[1].range(begin, end), own[2].range(begin, end));
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

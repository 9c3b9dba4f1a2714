#include <memory>
#include <utility>

#include "autograd/experts.h"

namespace sherd::autograd {
namespace {

void require_rows(const char* operation, const Shape& x) {
  require(x.rank() == 2, operation, ": the table must be [rows, width], not ", x.str());
}

Tensor rows_of(Tape& tape, const Tensor& x, const Tensor& rows) {
  Tensor out = tape.empty({rows.numel(), x.shape()[1]}, x.dtype());
  tape.kernels().embedding(rows, x, out);
  return out;
}

/// The gradient of a table of which runs of rows are used apart: each brings its rows.
struct RunGradients {
  GradRef dx;
  Shape shape;
  std::size_t missing;
  Tensor grad{};

  void add(Tape& tape, std::int64_t begin, const Tensor& dy) {
    if (!grad.defined()) grad = tape.empty(shape, dy.dtype());
    tape.kernels().copy(dy, grad.rows(begin, begin + dy.shape()[0]));
    if (--missing == 0) tape.accumulate(dx, std::exchange(grad, {}));
  }
};

}  // namespace

Tensor row_numbers(Tape& tape, const Shape& shape, std::span<const std::int32_t> values) {
  if (tape.device().kind() == device::Kind::meta) return Tensor::empty(tape.device(), shape, DType::i32);
  return Tensor::of<std::int32_t>(tape.device(), shape, values);
}

Var take_rows(const Var& x, const Tensor& rows) {
  Tape& tape = x.tape();
  require_rows("take_rows", x.shape());
  return tape.record(rows_of(tape, x.value(), rows), {x},
                     [rows, dx = x.grad_ref(), shape = x.shape()](Tape& t, const Tensor& dy) {
                       Tensor grad = t.empty(shape, dy.dtype());
                       t.kernels().embedding_backward(rows, dy, grad, false);
                       t.accumulate(dx, std::move(grad));
                     });
}

Var permute_rows(const Var& x, const Tensor& order, const Tensor& inverse) {
  Tape& tape = x.tape();
  require_rows("permute_rows", x.shape());
  require(order.numel() == x.shape()[0] && inverse.numel() == x.shape()[0], "permute_rows: ", x.shape().str(),
          " has another number of rows than its order, ", order.numel());
  return tape.record(
      rows_of(tape, x.value(), order), {x},
      [inverse, dx = x.grad_ref()](Tape& t, const Tensor& dy) { t.accumulate(dx, rows_of(t, dy, inverse)); });
}

std::vector<Var> split_rows(const Var& x, std::span<const std::int64_t> counts) {
  Tape& tape = x.tape();
  require_rows("split_rows", x.shape());
  auto gradients = std::make_shared<RunGradients>(RunGradients{x.grad_ref(), x.shape(), 0});
  std::vector<Var> out;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    require(count >= 0 && begin + count <= x.shape()[0], "split_rows: ", x.shape().str(),
            " has fewer rows than its runs");
    if (count == 0) continue;
    ++gradients->missing;
    out.push_back(
        tape.record(x.value().rows(begin, begin + count), {x},
                    [gradients, begin](Tape& t, const Tensor& dy) { gradients->add(t, begin, dy); }));
    begin += count;
  }
  require(begin == x.shape()[0], "split_rows: ", x.shape().str(), " has more rows than its runs, ", begin);
  return out;
}

Var join_rows(std::span<const Var> runs) {
  require(!runs.empty(), "join_rows: no rows");
  if (runs.size() == 1) return runs[0];
  Tape& tape = runs[0].tape();
  std::int64_t rows = 0;
  for (const Var& run : runs) {
    require_rows("join_rows", run.shape());
    rows += run.shape()[0];
  }
  const std::int64_t width = runs[0].shape()[1];
  Tensor out = tape.empty({rows, width}, runs[0].dtype());
  std::vector<std::pair<GradRef, std::int64_t>> ends;
  std::int64_t begin = 0;
  for (const Var& run : runs) {
    const std::int64_t end = begin + run.shape()[0];
    tape.kernels().copy(run.value(), out.rows(begin, end));
    ends.emplace_back(run.grad_ref(), begin = end);
  }
  return tape.record(std::move(out), runs, [ends](Tape& t, const Tensor& dy) {
    std::int64_t from = 0;
    for (const auto& [dx, end] : ends) {
      if (dx) t.accumulate(dx, dy.rows(from, end));
      from = end;
    }
  });
}

Var combine_rows(const Var& rows, const Tensor& places, const Var& weights) {
  Tape& tape = rows.tape();
  require(rows.shape().rank() == 2 && places.shape().rank() == 2, "combine_rows: rows ", rows.shape().str(),
          " at places ", places.shape().str(), ": both must have two extents");
  Tensor out = tape.empty({places.shape()[0], rows.shape()[1]}, rows.dtype());
  tape.kernels().combine_rows(rows.value(), places, weights.value(), out);
  auto backward = [x = Saved(rows), w = Saved(weights), places, dx = rows.grad_ref(), dw = weights.grad_ref(),
                   shape = rows.shape(), dtype = rows.dtype()](Tape& t, const Tensor& dy) {
    const Tensor weight = w.get(t);
    Tensor drows = dx ? t.empty(shape, dtype) : Tensor();
    Tensor dweights = dw ? t.empty(weight.shape(), weight.dtype()) : Tensor();
    t.kernels().combine_rows_backward(x.get(t), places, weight, dy, drows, dweights);
    if (dx) t.accumulate(dx, std::move(drows));
    if (dw) t.accumulate(dw, std::move(dweights));
  };
  return tape.record(std::move(out), {rows, weights}, std::move(backward));
}

}  // namespace sherd::autograd

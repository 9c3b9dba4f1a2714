#include "autograd/ops.h"

#include "autograd/gradients.h"
#include "autograd/key_cache.h"

namespace sherd::autograd {

Var embedding(const Tensor& ids, const Var& table, const tensor::VocabSlice& slice) {
  Tape& tape = table.tape();
  const Shape table_shape = table.shape();
  require(table_shape.rank() == 2, "embedding: the table must be [vocabulary, width], not ",
          table_shape.str());
  require(ids.dtype() == DType::i32, "embedding: ids must be int32, not ", name_of(ids.dtype()));
  require(ids.shape().rank() < Shape::max_rank, "embedding: ids have too many extents: ", ids.shape().str());
  std::vector<std::int64_t> dims(ids.shape().dims().begin(), ids.shape().dims().end());
  dims.push_back(table_shape[1]);
  const Tensor flat = ids.reshape({ids.numel()});
  Tensor out = tape.empty(Shape(std::span<const std::int64_t>(dims)), table.dtype());
  const Shape rows{ids.numel(), table_shape[1]};
  tape.kernels().embedding(flat, table.value(), out.reshape(rows), slice);
  auto backward = [flat, rows, slice, dtable = table.grad_ref(), table_shape](Tape& t, const Tensor& dy) {
    write_folded_grad(t, dtable, table_shape, dy.dtype(),
                      [&](const Tensor& to, bool add, std::optional<DType> fold) {
                        t.kernels().embedding_backward(flat, dy.reshape(rows), to, add, slice, fold);
                      });
  };
  return tape.record(std::move(out), {table}, std::move(backward));
}

Var add_positions(const Var& x, const Var& table, const tensor::Positions& positions) {
  Tape& tape = x.tape();
  require(x.shape().rank() == 3 && table.shape().rank() == 2 && x.shape()[2] == table.shape()[1] &&
              (tape.key_cache || positions.end(x.shape()[1]) <= table.shape()[0]),
          "add_positions: ", x.shape().str(), " from position ", positions.first,
          " on does not fit a table of positions of shape ", table.shape().str());
  Tensor out = tape.empty(x.shape(), x.dtype());
  for (const SameStart& part : by_start(tape, x.shape()[0], positions))
    tape.kernels().add_positions(x.value().rows(part.begin, part.end), table.value(),
                                 out.rows(part.begin, part.end), part.positions);
  auto backward = [dx = x.grad_ref(), dtable = table.grad_ref(), shape = table.shape(), positions](
                      Tape& t, Tensor dy) {
    if (dtable)
      write_kernel_grad(t, dtable, shape, dy.dtype(), [&](const Tensor& to, bool add) {
        t.kernels().add_positions_backward(dy, to, add, positions);
      });
    t.accumulate(dx, std::move(dy));
  };
  return tape.record(std::move(out), {x, table}, std::move(backward));
}

}  // namespace sherd::autograd

#include "sharding/parallel/sequence.h"

#include "base/error.h"
#include "sharding/parallel/exchanges.h"

namespace sherd::parallel {
namespace {

using tensor::Kernels;
using tensor::Positions;
using tensor::Shape;

enum class RowMove : std::uint8_t { from_whole, to_whole };

/// Moves the rows that lie at `at` between `whole` [batch, S, width] and `part` [batch, rows, width], which
/// begins at flat element `first` of its tensor.
void move_rows(Kernels& kernels, const Tensor& whole, const Tensor& part, std::int64_t first,
               const Shape& shape, const Positions& at, RowMove direction) {
  const std::int64_t batch = shape[0], rows = shape[1], width = shape[2];
  const std::int64_t all = whole.numel() / (batch * width);
  const std::int64_t lengths[2] = {at.count == 0 ? rows : at.count, at.count == 0 ? 0 : rows - at.count};
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t row = 0;
    for (const std::int64_t length : lengths) {
      if (length == 0) continue;
      const tensor::StridedRows there{whole, (b * all + at.at(row)) * width, width};
      const tensor::StridedRows here{part, first + (b * rows + row) * width, width};
      const bool out = direction == RowMove::to_whole;
      kernels.copy_rows(out ? here : there, out ? there : here, length, width);
      row += length;
    }
  }
}

}  // namespace

Tensor inner_part(Kernels& kernels, const Tensor& ids, const Layout& layout) {
  if (ids.shape().rank() != 2)
    fail(ErrorKind::data, "sequences must be [batch, seq], not ", ids.shape().str());
  const std::int64_t batch = ids.shape()[0], whole = ids.shape()[1], multiple = layout.sequence_multiple();
  if (whole % multiple != 0)
    fail(ErrorKind::data, "sequences of ", whole, " tokens cannot be cut over ", layout.tensor_size(),
         " tensor and ", layout.context_size(), " context ranks: make their length a multiple of ", multiple);
  if (layout.context_size() == 1) return ids;
  const std::int64_t rows = whole / layout.context_size();
  Tensor part = Tensor::empty(kernels.device(), {batch, rows}, ids.dtype());
  move_rows(kernels, ids, part, 0, {batch, rows, 1}, layout.inner_positions(rows), RowMove::from_whole);
  return part;
}

Tensor stream_part(Kernels& kernels, const Tensor& inner, const Layout& layout) {
  if (!layout.cuts_stream()) return inner;
  const std::int64_t batch = inner.shape()[0], all = inner.shape()[1], rows = all / layout.tensor_size();
  const Tensor own = Tensor::empty(kernels.device(), {batch, rows}, inner.dtype());
  kernels.copy_rows({inner, layout.tensor_rank() * rows, all}, {own, 0, rows}, batch, rows);
  return own;
}

Var gather_sequence(const Var& inner, const Layout& layout) {
  const int ranks = layout.context_size();
  if (ranks == 1) return inner;
  const Shape shape = inner.shape();
  require(shape.rank() == 3, "a part of sequences is [batch, rows, width], not ", shape.str());
  Tape& tape = inner.tape();
  const Shape whole_shape{shape[0], ranks * shape[1], shape[2]};
  Tensor parts = tape.empty({ranks * shape[0], shape[1], shape[2]}, inner.dtype());
  layout.context->all_gather({{inner.value(), parts}}, {.label = "whole sequences"}).wait();
  Tensor whole = tape.empty(whole_shape, inner.dtype());
  for (int rank = 0; rank < ranks; ++rank)
    move_rows(tape.kernels(), whole, parts, rank * shape.numel(), shape,
              layout.inner_positions(shape[1], rank), RowMove::to_whole);
  return tape.record(std::move(whole), {inner},
                     [dx = inner.grad_ref(), shape, at = layout.inner_positions(shape[1]),
                      dtype = inner.dtype()](Tape& t, const Tensor& dy) {
                       Tensor grad = t.empty(shape, dtype);
                       move_rows(t.kernels(), dy, grad, 0, shape, at, RowMove::from_whole);
                       t.accumulate(dx, std::move(grad));
                     });
}

}  // namespace sherd::parallel
